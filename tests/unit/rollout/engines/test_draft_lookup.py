"""Drafts are the tokens that followed before, from the source that is right most often."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rftmega.rollout.engines.draft_lookup import (
    REMEMBERED,
    RETRIED,
    AcceptanceRate,
    LookupDrafter,
    LookupProposer,
    TokenHistory,
)

PROMPT = [11, 12, 13, 14]
TEXT = [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]


def drafts(**given: float) -> LookupDrafter:
    return LookupDrafter(4, least=given.get("least", 0.2), most_rows=int(given.get("most_rows", 9)))


class Batch:
    """Rows of token ids, as vLLM has them, and their drafts."""

    def __init__(self, lookup: LookupDrafter, rows: int = 1):
        self.lookup = lookup
        self.tokens = np.full((rows, 200), -1, dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)

    def begin(self, prompt: Sequence[int], row: int = 0) -> None:
        self.tokens[row, : len(prompt)] = prompt
        self.lengths[row] = len(prompt)

    def step(self, *new: Sequence[int]) -> list[list[int]]:
        for row, tokens in enumerate(new):
            end = self.lengths[row] + len(tokens)
            self.tokens[row, self.lengths[row] : end] = tokens
            self.lengths[row] = end
        return self.lookup.next([list(tokens) for tokens in new], self.lengths, self.tokens)

    def swap(self) -> None:
        self.tokens, self.lengths = self.tokens[::-1].copy(), self.lengths[::-1].copy()


def generated(lookup: LookupDrafter, text: Sequence[int], prompt: Sequence[int] = PROMPT) -> None:
    """A request that generates `text`, a token per step."""
    batch = Batch(lookup)
    batch.begin(prompt)
    for token in text:
        batch.step([token])


def test_nothing_is_drafted_that_did_not_occur() -> None:
    batch = Batch(drafts())
    batch.begin(PROMPT)
    assert [batch.step([token]) for token in TEXT] == [[[]]] * len(TEXT)


def test_a_completion_of_the_same_prompt_is_drafted_from_its_first_token() -> None:
    lookup = drafts()
    generated(lookup, TEXT)
    batch = Batch(lookup)
    batch.begin(PROMPT)
    assert batch.step(TEXT[:1]) == [TEXT[1:5]]
    assert batch.step(TEXT[1:6]) == [TEXT[6:10]]  # all were accepted, and one came besides
    assert batch.step(TEXT[6:]) == [[]]  # nothing followed


def test_of_two_completions_the_later_one_is_drafted() -> None:
    lookup = drafts()
    generated(lookup, TEXT)
    generated(lookup, [21, 22, 33, 34, 35, 36])
    batch = Batch(lookup)
    batch.begin(PROMPT)
    assert batch.step([21]) == [[22, 33, 34, 35]]


def test_the_context_itself_is_a_source_prompt_included() -> None:
    batch = Batch(drafts())
    batch.begin([1, 2, 3, 4, 5, 6, 7])
    assert batch.step([2]) == [[]]
    assert batch.step([3]) == [[4, 5, 6, 7]]
    assert batch.step([9]) == [[]]


def test_completions_of_other_prompts_are_a_source_too() -> None:
    lookup = drafts()
    generated(lookup, TEXT)
    batch = Batch(lookup)
    batch.begin([1, 2, 3])
    assert batch.step(TEXT[2:3]) == [[]]
    assert batch.step(TEXT[3:4]) == [TEXT[4:8]]


def test_a_source_of_the_same_prompt_is_taken_for_one_of_others_while_it_is_as_good() -> None:
    lookup = drafts()
    generated(lookup, [21, 22, 23, 24, 25])
    generated(lookup, [21, 22, 73, 74, 75], prompt=[1, 2, 3])
    batch = Batch(lookup)
    batch.begin(PROMPT)
    batch.step([21])
    assert batch.step([22]) == [[23, 24, 25]]


def test_requests_keep_their_drafts_when_the_batch_moves_them() -> None:
    lookup = drafts()
    generated(lookup, TEXT)
    batch = Batch(lookup, rows=2)
    batch.begin(PROMPT, 0)
    batch.begin([1, 2, 3], 1)
    batch.step([21], [5])
    batch.swap()
    # a request that was taken for a new one would have its completion as its prompt
    assert batch.step([6], [22]) == [[], TEXT[2:6]]
    assert len(lookup._known) == 2


def test_a_row_whose_prompt_is_not_processed_has_no_draft() -> None:
    lookup = drafts()
    generated(lookup, TEXT)
    batch = Batch(lookup, rows=2)
    batch.begin(PROMPT, 0)
    batch.begin(PROMPT, 1)
    assert batch.step([], [21]) == [[], TEXT[1:5]]


def test_with_too_many_rows_nothing_is_drafted_or_remembered() -> None:
    lookup = drafts(most_rows=1)
    batch = Batch(lookup, rows=2)
    batch.begin(PROMPT, 0)
    batch.begin(PROMPT, 1)
    for token in TEXT[:4]:
        assert batch.step([token], [token]) == [[], []]
    assert lookup._history.appended == 0
    # one has ended; the other goes on, and its context is known from now on
    assert [batch.step([token], [])[0] for token in (*TEXT[4:7], *TEXT[:2])][-1] == TEXT[2:6]


def test_drafts_get_shorter_and_stop_where_they_are_rejected_and_are_tried_again() -> None:
    lookup = drafts(least=0.4)
    lengths = []
    for number in range(4 * RETRIED):  # completions that differ after one token
        batch = Batch(lookup)
        batch.begin(PROMPT)
        lengths.append(len(batch.step([21])[0]))
        batch.step([100 + number])
        batch.step([200 + number])
    assert lengths[:3] == [0, 2, 2]  # 0.7 ** 2 >= 0.4
    quiet = lengths[2 * RETRIED :]
    assert sum(quiet) == 2, lengths  # one token each, once in RETRIED requests
    assert set(quiet) == {0, 1}


def test_a_rate_of_acceptance_is_that_of_tokens_whose_predecessors_were_accepted() -> None:
    rate = AcceptanceRate()
    for _ in range(400):
        rate.add(3, rejected=True)  # three of four
    assert rate.rate == pytest.approx(0.75, abs=1e-3)
    assert rate.length(9, 0.4) == 3  # 0.75 ** 3 = 0.42
    assert rate.length(2, 0.4) == 2
    assert rate.length(9, 0.75 - 1e-2) == 1
    for _ in range(2000):
        rate.add(3, rejected=False)
    assert rate.length(9, 0.4) == 9


def test_memory_is_constant_and_the_oldest_tokens_are_overwritten() -> None:
    history = TokenHistory(remembered=16, entries=8)
    place = -1
    for token in range(40):
        place = history.append(token, place)
    assert len(history._tokens) == len(history._following) == 16
    assert list(history.after((place - 3) % 16)) == [37, 38, 39]


def test_a_sequence_that_was_overwritten_in_part_ends() -> None:
    history = TokenHistory(remembered=8, entries=8)
    first = place = history.append(0, -1)
    for token in range(1, 12):
        place = history.append(token, place)
    assert len(list(history.after(first))) <= 8


def test_a_prompt_whose_tokens_are_gone_is_added_again() -> None:
    lookup = drafts()
    generated(lookup, TEXT[:2], prompt=[1, 2, 3, 4, 5, 6, 7])
    lookup._history.appended += REMEMBERED
    batch = Batch(lookup)
    batch.begin([1, 2, 3, 4, 5, 6, 7])
    batch.step([2])
    assert batch.step([3]) == [[4, 5, 6, 7]]
    assert list(lookup._known.values()) == [REMEMBERED + 7 + 2]


def test_vllm_builds_it_from_the_options_of_the_run() -> None:
    config = SimpleNamespace(
        additional_config={"rftmega_drafts": {"least": 0.3, "most_rows": 8, "ends": [24]}},
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(eos_token_id=23)),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=3, draft_model_config=SimpleNamespace(max_model_len=64)
        ),
    )
    target = config.speculative_config.draft_model_config
    proposer = LookupProposer(config)
    generated(proposer.drafts, TEXT)
    tokens = np.array([[*PROMPT, 21]], dtype=np.int32)
    assert proposer.propose([[21]], np.array([5]), tokens, slot_mappings=None) == [[22, 23, 24]]
    assert proposer.drafts._ends == {24}
    # drafts may begin at the end of a row, which is no longer for that
    assert config.speculative_config.draft_model_config.max_model_len == 67
    assert target.max_model_len == 64


@pytest.mark.parametrize(("eos", "ends"), [(23, {23}), ([23, 25], {23, 25}), (None, set())])
def test_of_a_server_that_knows_no_ends_the_models_are_taken(eos: Any, ends: set[int]) -> None:
    text = SimpleNamespace() if eos is None else SimpleNamespace(eos_token_id=eos)
    model = SimpleNamespace(max_model_len=64)
    config = SimpleNamespace(
        additional_config={"rftmega_drafts": {"least": 0.3, "most_rows": 8, "ends": []}},
        model_config=SimpleNamespace(hf_text_config=text),
        speculative_config=SimpleNamespace(num_speculative_tokens=3, draft_model_config=model),
    )
    assert LookupProposer(config).drafts._ends == ends


def test_nothing_is_drafted_or_remembered_after_the_end_of_a_completion() -> None:
    lookup = LookupDrafter(4, least=0.2, most_rows=9, ends=[23])
    generated(lookup, TEXT[:3])
    batch = Batch(lookup)
    batch.begin(PROMPT)
    assert batch.step([21]) == [[22, 23]]
    assert batch.step([22, 23, 77, 78]) == [[]]  # sampled after a longer draft
    other = Batch(lookup)
    other.begin([1, 2, 3])
    assert other.step([22, 23, 77]) == [[]]
    assert lookup._requests == {}
    assert 77 not in lookup._history._tokens
    turn = Batch(lookup)
    turn.begin([1, 22, 23, 77, 5])  # an end within the context
    assert turn.step([22]) == [[]]
    turn.begin([1, 4, 22, 23, 77, 4])
    assert turn.step([22]) == [[23]]


def test_a_request_that_has_no_part_in_a_step_keeps_its_draft() -> None:
    lookup = drafts()
    generated(lookup, TEXT)
    batch = Batch(lookup, rows=2)
    batch.begin(PROMPT, 0)
    batch.begin([1, 2, 3, 4, 5, 6], 1)
    batch.step([21], [51])
    assert batch.step([], [61]) == [[], []]
    ((waiting,),) = [found for key, found in lookup._requests.items() if key[0] == 5]
    assert waiting.draft == TEXT[1:5]
    batch.step([22], [71])
    assert len(lookup._known) == 2  # it was not taken for a new one
