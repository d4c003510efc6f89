"""Validates a completion from a server before the trainer uses it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rftmega.core.errors import EngineFault
from rftmega.rollout.servers.vllm import protocol

REASONS = ("stop", "length", "abort")
# tolerance above 0 for log-probs: rounding error of a logit minus an fp32 sum
ROUNDING = 1e-4
LARGEST_ID = 2**31


class WrongReply(EngineFault):
    """WrongReply is raised for an invalid completion, which no working engine would generate."""


@dataclass(frozen=True)
class CompletionLimits:
    """CompletionLimits holds the limits that a completion must meet to be valid: most tokens, size
    of the vocabulary, and stop tokens.
    """

    most: int = LARGEST_ID  # tokens
    vocabulary: int = LARGEST_ID
    stop_ids: frozenset[int] = frozenset()
    other_stops: bool = True  # whether it may also stop otherwise, such as at strings


ANY_COMPLETION = CompletionLimits()


def checked(
    reply: protocol.ServerReply, limits: CompletionLimits
) -> tuple["array[Any]", "array[Any]"]:
    """Validates the completion in a server's reply and returns its token ids and log-probs.

    Raises WrongReply if the reply is no valid completion within `limits`.
    """
    for what, content in (("token ids", reply.token_ids), ("log-probs", reply.logprobs)):
        if len(content) % 4:
            raise WrongReply(f"A server gave {len(content)} bytes of {what}, of 4 bytes each.")
    ids, logprobs = protocol.numbers("i", reply.token_ids), protocol.numbers("f", reply.logprobs)
    if len(ids) != len(logprobs):
        raise WrongReply(f"A server gave {len(ids)} tokens and {len(logprobs)} log-probs.")
    if reply.reason not in REASONS:
        raise WrongReply(
            f"A server says that its completion ended by {reply.reason[:40]!r}, which is none of {', '.join(REASONS)}."
        )
    if len(ids) > limits.most:
        raise WrongReply(
            f"A server gave {len(ids)} tokens where at most {limits.most} were asked for."
        )
    if ids:
        _check_tokens(ids, logprobs, limits)
    _check_end(ids, reply.reason, limits)
    return ids, logprobs


def versions_of(
    spans: Sequence[tuple[str, int, int]], numbers: Sequence[int], tokens: int
) -> "array[Any]":
    """Returns the weight version of each token of a completion. `spans`: (version string, first
    token, end) of each range of tokens generated with one version; `numbers`: the version number of
    each range; `tokens`: length of the completion.

    Raises WrongReply if the ranges do not cover all tokens contiguously.
    """
    versions = array("i")
    for (_, start, end), number in zip(spans, numbers, strict=True):
        if start != len(versions) or not start <= end <= tokens:
            raise WrongReply(
                f"A server gave {tokens} tokens, and the version of its weights from token {start} to {end} where token "
                f"{len(versions)} is next."
            )
        versions.extend([number] * (end - start))
    if len(versions) != tokens:
        raise WrongReply(f"A server gave {tokens} tokens, and the versions of {len(versions)}.")
    return versions


def _check_tokens(ids: "array[Any]", logprobs: "array[Any]", limits: CompletionLimits) -> None:
    if min(ids) < 0 or max(ids) >= limits.vocabulary:
        wrong = next(token for token in ids if not 0 <= token < limits.vocabulary)
        raise WrongReply(
            f"A server gave the token {wrong}; there are 0 to {limits.vocabulary - 1}."
        )
    values = np.frombuffer(logprobs, np.float32)
    right = np.isfinite(values) & (values <= ROUNDING)
    if not right.all():
        place = int(np.argmin(right))
        raise WrongReply(
            f"A server gave token {place} the log-prob {values[place]}, which is that of no probability."
        )


def _check_end(ids: "array[Any]", reason: str, limits: CompletionLimits) -> None:
    """Raises WrongReply if the completion `ids` contradicts its finish reason (stop, length or
    abort) or continues after a stop token.
    """
    if not ids and reason != "abort":
        raise WrongReply(
            f"A server says that a completion ended by {reason}, and gave no token of it."
        )
    if reason == "abort" and len(ids) == limits.most:
        raise WrongReply(f"A server broke off a completion that had all its {limits.most} tokens.")
    before = ids if reason == "abort" else ids[:-1]
    if met := limits.stop_ids.intersection(before):
        raise WrongReply(f"A server went on behind the stop token {min(met)}.")
    if reason == "stop" and not limits.other_stops and ids[-1] not in limits.stop_ids:
        raise WrongReply(
            f"A server says that a completion stopped, whose last token {ids[-1]} is no stop token ({sorted(limits.stop_ids)})."
        )
