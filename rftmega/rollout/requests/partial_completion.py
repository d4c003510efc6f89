"""A completion that an engine generated in one or several pieces."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.types import Completion


@dataclass(frozen=True)
class PartialCompletion:
    """PartialCompletion has a weight version and a log-prob per token, and a finish reason: stop,
    length, or abort if it can continue.
    """

    token_ids: "array[Any]" = field(default_factory=lambda: array("i"))
    logprobs: "array[Any]" = field(default_factory=lambda: array("f"))
    of_tokens: "array[Any]" = field(default_factory=lambda: array("i"))  # versions
    reason: str = "abort"
    routes: Tensor | None = field(default=None, compare=False)  # see Completion

    @staticmethod
    def of(completion: Completion) -> "PartialCompletion":
        """Converts a finished completion."""
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
        """Returns the completion extended by `more`."""
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
        """Returns the finished completion."""
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
