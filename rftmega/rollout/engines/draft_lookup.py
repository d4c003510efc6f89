"""Drafts for speculative decoding without a draft model: the tokens that followed when the last
tokens of a completion occurred before, in its own context, in other completions of the same
prompt, or in completions of other prompts.

vLLM builds `LookupProposer` in its worker (`speculative_config.method`: custom_class).
"""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
SIZES = (8, 4, 2)  # numbers of last tokens that are looked up
BYTES = 4  # of a token
ANY_PROMPT = 0  # the scope of all prompts
REMEMBERED = 2**18  # tokens
ENTRIES = 2**20  # places of remembered token sequences; a power of two
CONTEXT = 2**12  # last tokens of a prompt that are remembered
PROMPTS = 2**14  # of which it is known that the history has them
RETRIED = 32  # a source of drafts that are rejected is tried once in so many times
FORGETTING = 0.98  # weight of earlier drafts in the rate of acceptance, per draft
PRIOR = 4.0  # weight of a rate of EXPECTED at the start
EXPECTED = 0.7


class DraftSource(NamedTuple):
    """DraftSource is one way to find a draft: whether the prompt must be the same, and the number of
    last tokens that must be equal.
    """

    same_prompt: bool
    size: int


SOURCES = [DraftSource(same_prompt, size) for same_prompt in (True, False) for size in SIZES]


class AcceptanceRate:
    """AcceptanceRate estimates the share of a source's drafted tokens that are accepted, each given
    that the tokens before it were.
    """

    def __init__(self) -> None:
        self._accepted, self._decided = EXPECTED * PRIOR, PRIOR
        self._passed = 0

    @property
    def rate(self) -> float:
        return self._accepted / self._decided

    def add(self, accepted: int, *, rejected: bool) -> None:
        """Adds a draft of which the first `accepted` tokens were accepted; `rejected`: whether
        another one followed, which was not.
        """
        self._accepted = self._accepted * FORGETTING + accepted
        self._decided = self._decided * FORGETTING + accepted + rejected

    def length(self, longest: int, least: float) -> int:
        """Returns how many tokens to draft, at most `longest`: those that are accepted with a
        probability of at least `least`. If there are none, returns 1 once in RETRIED calls, else 0.
        """
        rate = self.rate
        if rate >= least:
            return longest if rate >= 1 else min(longest, int(log(least) / log(rate)))
        self._passed += 1
        return int(self._passed % RETRIED == 0)


class TokenHistory:
    """TokenHistory remembers the last REMEMBERED tokens of all sequences, and what followed each
    group of SIZES tokens. Memory is constant. Older tokens are overwritten, and so are places of
    other groups with the same hash: a draft may be wrong, since it is only a guess.
    """

    def __init__(self, remembered: int = REMEMBERED, entries: int = ENTRIES) -> None:
        self._tokens = array("i", bytes(BYTES * remembered))
        self._following = array("i", [-1]) * remembered
        self._places = array("i", [-1]) * entries
        self._checks = array("I", bytes(BYTES * entries))
        self._remembered, self._entries = remembered, entries
        self.appended = 0  # tokens, also those overwritten since

    def append(self, token: int, last: int) -> int:
        """Appends a token to the sequence whose last token is at place `last`, or to a new sequence
        for -1. Returns the token's place.
        """
        place = self.appended % self._remembered
        self.appended += 1
        self._tokens[place], self._following[place] = token, -1
        if last >= 0:
            self._following[last] = place
        return place

    def index(self, ending: bytes, scope: int, place: int) -> None:
        """Stores `place`, that of the last token of `ending`, for each of SIZES last tokens.
        `scope`: number of the prompt, or ANY_PROMPT.
        """
        for size in SIZES:
            if len(ending) >= BYTES * size:
                check = zlib.crc32(ending[-BYTES * size :], scope)
                self._places[check % self._entries] = place
                self._checks[check % self._entries] = check

    def find(self, ending: bytes, scope: int, size: int) -> int:
        """Returns the place of the last of the `size` tokens at the end of `ending`, where these
        occurred in `scope`; -1 if they didn't.
        """
        if len(ending) < BYTES * size:
            return -1
        check = zlib.crc32(ending[-BYTES * size :], scope)
        found = check % self._entries
        return self._places[found] if self._checks[found] == check else -1

    def after(self, place: int) -> Iterator[int]:
        """Yields the tokens that follow a place, in their sequence."""
        for _ in range(self._remembered):
            place = self._following[place]
            if place < 0:
                return
            yield self._tokens[place]


class FollowedRequest:
    """FollowedRequest is a request that generates tokens: the number of its prompt, the place of
    its last token in the history, and its last draft with the draft's source.
    """

    def __init__(self, scope: int, place: int):
        self.scope, self.place = scope, place
        self.draft: list[int] = []
        self.source = SOURCES[0]


class LookupDrafter:
    """LookupDrafter follows the requests of an engine, and drafts their next tokens.

    It sees the rows of vLLM's batch, which requests may change at each step. A request is
    recognised by its length and last tokens. If two are equal in these, taking one for the other
    only changes guesses.
    """

    def __init__(self, longest: int, *, least: float, most_rows: int, ends: Sequence[int] = ()):
        """`longest`: most tokens of a draft. `least`: probability of acceptance below which tokens
        are not drafted. `most_rows`: with more requests than this, nothing is drafted or
        remembered, which would take time from all. `ends`: tokens that end a completion; nothing is
        drafted or remembered after them.
        """
        self._longest, self._least, self._most_rows = longest, least, most_rows
        self._ends = frozenset(ends)
        self._history = TokenHistory()
        self._known: dict[int, int] = {}  # number of a prompt -> tokens appended before it
        self._requests: dict[tuple[int, bytes], list[FollowedRequest]] = {}
        self._rates = {source: AcceptanceRate() for source in SOURCES}

    def next(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], tokens: Tokens
    ) -> list[list[int]]:
        """Returns a draft, maybe empty, for each row. `sampled`: the tokens that each row has just
        got, none for a row that had no part in the step; some may come after the end of the
        completion. `lengths`: tokens of each row with these. `tokens`: [rows, at least the longest
        length].
        """
        if sum(map(bool, sampled)) > self._most_rows:
            self._requests = {}
            return [[] for _ in sampled]
        requests: dict[tuple[int, bytes], list[FollowedRequest]] = {}
        drafts: list[list[int]] = []
        for row, new in enumerate(sampled):
            drafts.append([])
            length = int(lengths[row])
            if not new:
                self._keep(requests, tokens[row], length)
                continue
            before = length - len(new)
            ends = [place for place, token in enumerate(new, start=1) if token in self._ends]
            kept = new[: ends[0]] if ends else new
            context = tokens[row, max(0, before - SIZES[0]) : before + len(kept)].tobytes()
            request = self._request(tokens[row], before)
            self._count(request, new)
            self._remember(request, context, kept)
            if ends:
                continue
            request.draft = self._draft(request, context)
            drafts[-1] = request.draft
            key = length, context[-BYTES * SIZES[0] :]
            requests.setdefault(key, []).append(request)
        self._requests = requests
        return drafts

    def _keep(
        self,
        requests: dict[tuple[int, bytes], list[FollowedRequest]],
        tokens: Tokens,
        length: int,
    ) -> None:
        """Keeps a request that had no part in the step, if it is known, in `requests`."""
        key = length, tokens[max(0, length - SIZES[0]) : length].tobytes()
        if found := self._requests.get(key):
            requests.setdefault(key, []).append(found.pop())

    def _request(self, tokens: Tokens, length: int) -> FollowedRequest:
        """Returns the request whose tokens, before this step, were the first `length` ones."""
        ending = tokens[max(0, length - SIZES[0]) : length].tobytes()
        if found := self._requests.get((length, ending)):
            return found.pop()
        scope = zlib.crc32(tokens[:length].tobytes()) or 1
        if self._is_known(scope):
            return FollowedRequest(scope, self._history.append(int(tokens[length - 1]), -1))
        return FollowedRequest(scope, self._add_prompt(scope, tokens[:length]))

    def _is_known(self, scope: int) -> bool:
        """Returns whether the history still has the tokens of a prompt."""
        since = self._known.get(scope)
        return since is not None and self._history.appended - since < REMEMBERED // 2

    def _add_prompt(self, scope: int, prompt: Tokens) -> int:
        """Adds a new prompt's tokens to the history, as the context of its own completions. Returns
        the place of the last one.
        """
        self._known.pop(scope, None)
        self._known[scope] = self._history.appended
        if len(self._known) > PROMPTS:
            del self._known[next(iter(self._known))]
        latest = prompt[-CONTEXT:]
        place = self._history.append(int(latest[0]), -1)
        raw = latest.tobytes()
        for end, token in enumerate(latest[1:].tolist(), start=1):
            ending = raw[max(0, BYTES * (end - SIZES[0])) : BYTES * end]
            self._history.index(ending, scope, place)
            place = self._history.append(token, place)
        return place

    def _count(self, request: FollowedRequest, new: Sequence[int]) -> None:
        """Adds the request's last draft to the acceptance rate of its source."""
        if not request.draft:
            return
        pairs = zip(request.draft, new, strict=False)
        agreed = [drafted == token for drafted, token in pairs]
        accepted = agreed.index(False) if False in agreed else len(agreed)
        self._rates[request.source].add(accepted, rejected=False in agreed)

    def _remember(self, request: FollowedRequest, context: bytes, new: Sequence[int]) -> None:
        """Adds a request's new tokens, the last ones of `context`, to the history.

        The tokens before each new one are indexed only now, since something follows them now.
        """
        for number, token in enumerate(new):
            end = len(context) - BYTES * (len(new) - number)
            ending = context[max(0, end - BYTES * SIZES[0]) : end]
            self._history.index(ending, request.scope, request.place)
            self._history.index(ending, ANY_PROMPT, request.place)
            request.place = self._history.append(token, request.place)

    def _draft(self, request: FollowedRequest, context: bytes) -> list[int]:
        """Returns a draft from the matching source whose drafts are accepted most often; an empty
        one if nothing matches.
        """
        best, place = SOURCES[0], -1
        for source in SOURCES:
            scope = request.scope if source.same_prompt else ANY_PROMPT
            found = self._history.find(context, scope, source.size)
            if found >= 0 and (place < 0 or self._rates[source].rate > self._rates[best].rate):
                best, place = source, found
        if place < 0:
            return []
        request.source = best
        length = self._rates[best].length(self._longest, self._least)
        draft = []
        for token in islice(self._history.after(place), length):
            draft.append(token)
            if token in self._ends:
                break
        return draft


class LookupProposer:
    """LookupProposer is the proposer that vLLM builds in its worker and asks after each step."""

    def __init__(self, vllm_config: Any):
        chosen = vllm_config.speculative_config
        # vLLM 0.32 verifies token 0 as the draft of all rows of a step if one row is so long that a
        # draft model, which this is not, could not draft after it
        chosen.draft_model_config = copy(chosen.draft_model_config)
        chosen.draft_model_config.max_model_len += chosen.num_speculative_tokens
        given = vllm_config.additional_config["rftmega_drafts"]
        eos = getattr(vllm_config.model_config.hf_text_config, "eos_token_id", None)
        of_model = [eos] if isinstance(eos, int) else eos or []
        self.drafts = LookupDrafter(
            chosen.num_speculative_tokens,
            least=given["least"],
            most_rows=given["most_rows"],
            ends=given["ends"] or of_model,
        )

    def load_model(self, target_model: Any) -> None:
        """Does nothing: there is no draft model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns a draft for each row of the batch; see `LookupDrafter.next`."""
        return self.drafts.next(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
