"""A teacher on vLLM servers, which is asked for log-probs of given tokens (prompt log-probs)."""

import itertools
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rftmega.config.addresses import address_of
from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import ConfigError, EngineError
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import Rows
from rftmega.rollout.servers.protocol.http_reply import BROKEN, asked
from rftmega.runtime.parallel import host_memory
from rftmega.runtime.parallel.collectives import gather_objects

ATTEMPTS = 6  # requests for a row, each to another server in turn
LONGEST_PAUSE = 20.0  # seconds between two attempts
AT_ONCE = 8  # requests of a process at a time
SECONDS = 600.0  # time limit of a request
SMALLEST = 1e-9  # probability of all tokens that are not among the likeliest ones


class ServedTeacher:
    """ServedTeacher asks vLLM's OpenAI server for the log-probs of rows; processes share the rows.

    Servers compute at temperature 1. They must be started with --max-logprobs of at least the
    number of likeliest tokens.
    """

    def __init__(
        self,
        chosen: Teacher,
        *,
        vocabulary: int,
        rank: int = 0,
        ranks: int = 1,
        pause: float = 0.5,
    ):
        """`vocabulary`: number of token ids of the policy. `rank`, `ranks`: of this process among
        those that share the rows. `pause`: seconds before the second attempt of a request.
        """
        self.rank, self.ranks = rank, ranks
        self.addresses = [address_of(address) for address in chosen.addresses]
        self.vocabulary, self.pause = vocabulary, pause
        self.headers = {}
        if chosen.key_env:
            key = os.environ.get(chosen.key_env)
            if not key:
                raise ConfigError(
                    f"algorithm.teachers[].key_env={chosen.key_env}: this environment variable is not set. Export the key of "
                    "the teacher's servers under this name."
                )
            self.headers["Authorization"] = f"Bearer {key}"
        self._models: dict[str, str] = {}
        self._turn, self._lock = itertools.count(), threading.Lock()

    def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
        """Returns the requested numbers, see `core.interfaces.TeacherScorer`.

        Raises EngineError, on all processes, if no server answers for a row.
        """
        own = list(range(self.rank, len(rows), self.ranks))
        found, error = [], ""
        try:
            with ThreadPoolExecutor(AT_ONCE, "teacher") as threads:
                found = list(threads.map(lambda row: self._of_row(rows, row, request), own))
        except EngineError as raised:  # the others wait for this process's rows
            error = str(raised)
        if errors := list(filter(None, gather_objects(error))):
            raise EngineError(errors[0])
        counts = rows.mask.sums()
        given = ((torch.tensor([row]), values) for row, values in zip(own, found, strict=True))
        columns = host_memory.current().of_tokens(counts, request.columns(0, torch.float32), given)
        return TeacherScores(torch.ones(len(rows), dtype=torch.bool), **columns)

    def _of_row(self, rows: Rows[Any], row: int, request: TeacherRequest) -> dict[str, Tensor]:
        tokens = rows.tokens[row].tolist()
        targets = rows.mask[row].nonzero()[:, 0].tolist()
        failures = []
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            with self._lock:
                address = self.addresses[next(self._turn) % len(self.addresses)]
            try:
                places = self._asked(address, tokens, request)
                return self._read(places, tokens, targets, request)
            except BROKEN as error:
                failures.append(f"{address}: {type(error).__name__}: {error}")
        raise EngineError(
            f"No server of the teacher gave log-probs of a row of {len(tokens)} tokens, in {ATTEMPTS} attempts; the last one: "
            f"{failures[-1]}. Are algorithm.teachers[].addresses right, is the teacher's server up, started with "
            f"--max-logprobs {max(request.k, 20)} and a --max-model-len above this length?"
        )

    def _asked(self, address: str, tokens: Sequence[int], request: TeacherRequest) -> list[Any]:
        """Returns the log-probs of every token of a row as the server gives them."""
        body = {
            "model": self._model(address),
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": request.k if request.vocabulary == "top_k" else 0,
        }
        url = f"{address}/v1/completions"
        reply = asked("POST", url, SECONDS, json=body, headers=self.headers)
        if reply.status != 200:
            raise ValueError(str(reply))
        choices = reply.read().get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ValueError(f"it gives no choice: {reply}")
        places = choices[0].get("prompt_logprobs")
        if not isinstance(places, list) or len(places) != len(tokens):
            raise ValueError("its prompt_logprobs are not one per token: is it a vLLM server?")
        return places

    def _model(self, address: str) -> str:
        if address not in self._models:
            reply = asked("GET", f"{address}/v1/models", SECONDS, headers=self.headers)
            data = reply.read().get("data") if reply.status == 200 else None
            if not isinstance(data, list) or not data or not isinstance(data[0], dict):
                raise ValueError(f"/v1/models names no model: {reply}")
            self._models[address] = str(data[0].get("id"))
        return self._models[address]

    def _read(
        self,
        places: Sequence[Any],
        tokens: Sequence[int],
        targets: Sequence[int],
        request: TeacherRequest,
    ) -> dict[str, Tensor]:
        """Returns the columns of a row; `targets`: the masked targets, target t is token t + 1.
        Raises ValueError for log-probs that no distribution has.
        """
        known = [self._log_probs(places[target + 1]) for target in targets]
        own = [each.get(tokens[t + 1]) for t, each in zip(targets, known, strict=True)]
        if any(value is None for value in own):
            raise ValueError("it gives no log-prob of a token of the row")
        logp = torch.tensor(own, dtype=torch.float32)
        if request.vocabulary == "sampled":
            return {"logp": logp}
        likeliest = [_likeliest(each, request.k) for each in known]
        ids = torch.tensor([[token for token, _ in each] for each in likeliest], dtype=torch.int32)
        values = torch.tensor([[value for _, value in each] for each in likeliest])
        ids, values = ids.view(-1, request.k), values.view(-1, request.k).double()
        tail = (1.0 - values.exp().sum(-1)).clamp(min=SMALLEST).log()
        buckets = torch.cat([values, tail[:, None]], -1).float()
        return {"logp": logp, "ids": ids, "buckets": buckets}

    def _log_probs(self, place: Any) -> dict[int, float]:
        """Returns token id -> log-prob of one place of a reply."""
        if not isinstance(place, Mapping):
            raise ValueError("a token has no log-probs")
        found = {}
        for token, entry in place.items():
            value = entry.get("logprob") if isinstance(entry, Mapping) else None
            if not str(token).isdecimal() or int(token) >= self.vocabulary:
                raise ValueError(f"{str(token)[:40]!r} is no token id of the policy")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"token {token} has no log-prob")
            if math.isnan(value) or value > 1e-4:
                raise ValueError(f"token {token} has the log-prob {value}")
            found[int(token)] = max(min(float(value), 0.0), -1e4)
        return found


def _likeliest(known: Mapping[int, float], k: int) -> list[tuple[int, float]]:
    """Returns the `k` likeliest of the tokens with their log-probs. Raises ValueError for fewer."""
    if len(known) < k:
        raise ValueError(f"it gives {len(known)} log-probs of a token, and {k} were asked for")
    return sorted(known.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
