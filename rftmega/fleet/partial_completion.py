"""PartialCompletion holds what a server has answered, in one piece or in several."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from rftmega.errors import EngineError, EngineFault
from rftmega.fleet import wire
from rftmega.types import Completion


class StaleAnswer(EngineFault):
    """StaleAnswer is a server's that says that it has other weights than it was given."""


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
    def of(answer: wire.ServerAnswer) -> "PartialCompletion":
        """Raises StaleAnswer for tokens of no push, EngineError for some without a version or a log-prob."""
        ids, logprobs = wire.numbers("i", answer.token_ids), wire.numbers("f", answer.logprobs)
        versions = array("i")
        for version, start, end in answer.spans:
            said = f"A server answered under weights {version!r} from token {start} on."
            if not version.isdecimal():
                raise StaleAnswer(said)
            if start != len(versions):
                raise EngineError(said)
            versions.extend([int(version)] * (end - start))
        if not len(ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"A server gave {len(ids)} tokens, {len(logprobs)} log-probs and the versions of {len(versions)}."
            )
        return PartialCompletion(ids, logprobs, versions, answer.reason)

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
