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
    """PartialCompletion is a completion or the first part of one. It has a log-prob and a weight
    version (`of_tokens`) per token, since parts may be generated with different weights. `reason`
    is the finish reason: stop, length, or abort if the completion can be continued.
    """

    token_ids: "array[Any]" = field(default_factory=lambda: array("i"))
    logprobs: "array[Any]" = field(default_factory=lambda: array("f"))
    of_tokens: "array[Any]" = field(default_factory=lambda: array("i"))  # versions
    reason: str = "abort"
    routes: Tensor | None = field(default=None, compare=False)  # see Completion

    @staticmethod
    def of(completion: Completion) -> "PartialCompletion":
        """Returns a finished Completion as a PartialCompletion."""
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
        """Returns this completion with the tokens of `more`, its continuation, appended."""
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
        """Returns this completion, which must be finished (stop or length), as a Completion."""
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
