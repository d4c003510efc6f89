"""A completion that an engine generated in one or several parts, possibly with different weight
versions.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.types import Completion


@dataclass(frozen=True)
class PartialCompletion:
    """PartialCompletion is a completion or the first part of one, with a weight version and
    log-prob per token. `reason` is stop, length, or abort if it can be continued.
    """

    token_ids: "array[Any]" = field(default_factory=lambda: array("i"))
    logprobs: "array[Any]" = field(default_factory=lambda: array("f"))
    of_tokens: "array[Any]" = field(default_factory=lambda: array("i"))  # versions
    reason: str = "abort"
    routes: Tensor | None = field(default=None, compare=False)  # see Completion

    @staticmethod
    def of(completion: Completion) -> "PartialCompletion":
        """Converts a finished Completion."""
        versions = completion.versions or array("i", [completion.policy_version]) * len(
            completion.token_ids
        )
        return PartialCompletion(
            completion.token_ids,  # type: ignore[arg-type]
            completion.logprobs,  # type: ignore[arg-type]
            versions,  # type: ignore[arg-type]
            completion.finish_reason,
            completion.routes,
        )

    def with_more(self, more: "PartialCompletion") -> "PartialCompletion":
        """Returns this completion with the tokens of `more` appended."""
        return PartialCompletion(
            self.token_ids + more.token_ids,
            self.logprobs + more.logprobs,
            self.of_tokens + more.of_tokens,
            more.reason,
            expert_routes.joined(self.routes, more.routes),
        )

    @property
    def versions(self) -> set[int]:
        return set(self.of_tokens)

    def whole(self) -> Completion:
        """Returns the finished completion as a Completion."""
        assert self.reason in ("stop", "length"), self.reason
        newest = self.of_tokens[-1]
        mixed = self.of_tokens if len(self.versions) > 1 else ()
        return Completion(
            self.token_ids,
            self.logprobs,
            self.reason,  # type: ignore[arg-type]
            newest,
            mixed,
            self.routes,
        )


NOTHING = PartialCompletion()
