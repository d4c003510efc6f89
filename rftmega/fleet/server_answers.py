"""Reads what servers answer."""

from array import array

from rftmega.errors import EngineError, EngineFault
from rftmega.fleet import wire
from rftmega.requests.partial_completion import PartialCompletion


class StaleAnswer(EngineFault):
    """StaleAnswer is a server's that says that it has other weights than it was given."""


def answered(answer: wire.ServerAnswer) -> PartialCompletion:
    """Returns what a server has answered.

    Raises StaleAnswer for tokens of no push, EngineError for some without a version or a log-prob.
    """
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
