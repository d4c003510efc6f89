"""Stores the finished and partial completions of interrupted rollouts, so that these rollouts
continue in a later generation with the tokens they have.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rftmega.rollout.requests.partial_completion import NOTHING, PartialCompletion
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.host_memory import HostMemory


class CachedCompletion(NamedTuple):
    """CachedCompletion is a full or partial completion of one turn of a rollout, with the digest of
    its context (the token ids before it), which tells whether it can be reused.
    """

    context: bytes
    completion: PartialCompletion


PartialRollout = Mapping[int, CachedCompletion]  # by turn


class PartialRollouts:
    """PartialRollouts holds, in one process, the completions from which interrupted rollouts
    continue: completions of earlier generations, and completions recorded in the current
    generation.
    """

    def __init__(self, before: Mapping[int, PartialRollout]):
        """Starts a generation. `before`: completions of earlier generations, as task index -> turn
        -> completion.
        """
        self._found = {place: dict(turns) for place, turns in before.items()}
        self._noted: set[int] = set()

    def known(self, place: int, turn: int, context: bytes) -> PartialCompletion:
        """Returns the recorded completion of turn `turn` of the task with index `place`. Returns
        NOTHING (no tokens) if there is none or its context had another digest than `context`, for
        example because a tool has now replied differently.
        """
        found = self._found.get(place, {}).get(turn)
        return NOTHING if found is None or found.context != context else found.completion

    def note(self, place: int, turn: int, context: bytes, completion: PartialCompletion) -> None:
        self._found.setdefault(place, {})[turn] = CachedCompletion(context, completion)
        self._noted.add(place)

    @property
    def noted(self) -> dict[int, PartialRollout]:
        """Returns the rollouts for which completions were recorded in this generation, as task
        index -> turn -> completion.
        """
        return {place: self._found[place] for place in sorted(self._noted)}


def digest(context: Sequence[int]) -> bytes:
    """Returns a 16-byte hash of the token ids of a context."""
    return hashlib.blake2b(np.asarray(context, np.int32).tobytes(), digest_size=16).digest()


def everywhere(own: Mapping[int, PartialRollout], host: HostMemory) -> dict[int, PartialRollout]:
    """Gathers the partial rollouts of all processes on every process and returns them, by task
    index; a collective. `own`: this process's partial rollouts, by task index, each on one process
    only; `host`: shared memory for the gathered arrays.
    """
    packed = packed_partials(own)
    columns = packed.pop("columns")
    told = gather_objects((packed["answers"], packed["routes"], len(columns[0])))
    columns = host.gathered(columns, [size for _, _, size in told])
    completions = [completion for theirs, _, _ in told for completion in theirs]
    routes = [own for _, theirs, _ in told for own in theirs]
    return unpacked_partials({"answers": completions, "columns": columns, "routes": routes})


def packed_partials(rollouts: Mapping[int, PartialRollout]) -> dict[str, Any]:
    """Converts partial rollouts to plain lists and tensors, for a checkpoint or a message. Returns
    a dict: "answers" has [task index, turn, digest, number of tokens, finish reason] of each
    completion; "columns" the ids, log-probs and weight versions of all tokens, one tensor each;
    "routes" the expert routes of each completion.
    """
    completions, parts = [], [NOTHING]
    for place, turns in rollouts.items():
        for turn, (context, completion) in turns.items():
            completions.append(
                [place, turn, context.hex(), len(completion.token_ids), completion.reason]
            )
            parts.append(completion)
    columns = [
        torch.from_numpy(np.concatenate([np.asarray(getattr(part, name)) for part in parts]))
        for name in ("token_ids", "logprobs", "of_tokens")
    ]
    routes = [part.routes for part in parts[1:]]
    return {"answers": completions, "columns": columns, "routes": routes}


def unpacked_partials(packed: Mapping[str, Any]) -> dict[int, PartialRollout]:
    """Returns the partial rollouts, by task index, from the result of `packed_partials`."""
    ids, logprobs, versions = packed["columns"]
    routes = packed.get("routes") or [None] * len(packed["answers"])
    found: dict[int, dict[int, CachedCompletion]] = {}
    start = 0
    for said, told in zip(packed["answers"], routes, strict=True):
        place, turn, context, tokens, reason = said
        own = slice(start, start + tokens)
        completion = PartialCompletion(
            _array("i", ids[own]),
            _array("f", logprobs[own]),
            _array("i", versions[own]),
            reason,
            told,
        )
        found.setdefault(place, {})[turn] = CachedCompletion(bytes.fromhex(context), completion)
        start += tokens
    return dict(found)


def _array(kind: str, column: Tensor) -> "array[Any]":
    return array(kind, column.numpy().tobytes())
