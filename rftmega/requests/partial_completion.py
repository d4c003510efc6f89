"""PartialCompletion holds what an engine has answered, in one piece or in several."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from rftmega.types import Completion


@dataclass(frozen=True)
class PartialCompletion:
    """PartialCompletion has a version and a log-prob a token, and how it ended: stop, length, or
    abort where it can go on.
    """

    token_ids: "array[Any]" = field(default_factory=lambda: array("i"))
    logprobs: "array[Any]" = field(default_factory=lambda: array("f"))
    of_tokens: "array[Any]" = field(default_factory=lambda: array("i"))  # versions
    reason: str = "abort"

    @staticmethod
    def of(answer: Completion) -> "PartialCompletion":
        """Returns a completion that has ended. What its engine tells of experts is left out."""
        versions = answer.versions or array("i", [answer.policy_version]) * len(answer.token_ids)
        return PartialCompletion(answer.token_ids, answer.logprobs, versions, answer.finish_reason)  # type: ignore[arg-type]

    def with_more(self, more: "PartialCompletion") -> "PartialCompletion":
        """Returns both, one behind the other."""
        return PartialCompletion(
            self.token_ids + more.token_ids,
            self.logprobs + more.logprobs,
            self.of_tokens + more.of_tokens,
            more.reason,
        )

    @property
    def versions(self) -> set[int]:
        return set(self.of_tokens)

    def whole(self) -> Completion:
        """Returns the completion, which has ended."""
        assert self.reason in ("stop", "length"), self.reason
        newest = self.of_tokens[-1]
        mixed = self.of_tokens if len(self.versions) > 1 else ()
        return Completion(self.token_ids, self.logprobs, self.reason, newest, mixed)  # type: ignore[arg-type]


NOTHING = PartialCompletion()
