import sys
from collections.abc import Sequence

import pytest

from rftmega.config import RolloutConfig
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.requests.order import RequestOrder, Waiting, ordered
from rftmega.trainer.expected_lengths import ExpectedLengths
from tests.rollouts import answered


class AsLongAsItsSeed(ScriptedEngine):
    """Request with seed n: n tokens."""

    def _completion(self, seed: int) -> Completion:
        assert self.version is not None
        return Completion((3,) * seed, (0.0,) * seed, "stop", self.version)


def prompts_of(*lengths: int) -> list[Prompt]:
    """As long as given, no two alike."""
    return [
        Prompt((place, *(7,) * (length - 1)), index=place) for place, length in enumerate(lengths)
    ]


def completions_of(lengths: Sequence[int]) -> list[Rollout]:
    return [answered((3,) * length) for length in lengths]


def shares(prompts: Sequence[Prompt], expected: Sequence[float], engines: int) -> list[list[int]]:
    """Of engines that have room for everything."""
    first, rest = ordered(prompts, expected, engines, sys.maxsize)
    assert not rest
    return first


def steps_of(orders: list[list[int]], lengths: list[int], *, slots: int) -> int:
    """Engine steps until the last of these engines is through."""
    taken = []
    for places in orders:
        engine = AsLongAsItsSeed(RolloutConfig(max_batch=slots), vocabulary=9, stop_ids=[3])
        engine.load_weights([], version=0)
        found = engine.generate(
            [Prompt((1,))] * len(places), seeds=[lengths[p] for p in places], sampling=Sampling(1.0)
        )
        assert [len(completion.token_ids) for completion in found] == [lengths[p] for p in places]
        taken.append(engine.steps)
    return max(taken)


def test_a_second_rollout_ends_after_fewer_engine_steps_than_one_in_the_order_given() -> None:
    lengths = [2, 3, 2, 4, 3, 2, 3, 40, 2, 3, 2, 3, 30, 2, 3, 36]
    prompts, halves = prompts_of(*[5] * 16), [list(range(8)), list(range(8, 16))]
    seen = ExpectedLengths()
    assert shares(prompts, seen.expected(prompts), 1) == [list(range(16))], (
        "nothing tells new prompts of one length apart"
    )
    seen.learn(prompts, completions_of(lengths))
    as_given = steps_of(halves, lengths, slots=2)
    balanced = steps_of(shares(prompts, seen.expected(prompts), 2), lengths, slots=2)
    assert (as_given, balanced) == (49, 40), "40 is the longest answer: no order is faster"
    alone = [
        steps_of(order, lengths, slots=3)
        for order in ([list(range(16))], shares(prompts, seen.expected(prompts), 1))
    ]
    assert alone == [54, 47], "140 tokens in 3 slots take 47 steps at least"


def test_engines_get_about_as_many_expected_tokens_each_and_every_request_once() -> None:
    expected = [float(1 + 7 * n % 50) for n in range(60)]
    found = shares(prompts_of(*[3] * 60), expected, 4)
    assert sorted(place for part in found for place in part) == list(range(60))
    loads = [sum(expected[place] for place in part) for part in found]
    assert max(loads) - min(loads) <= min(expected) * 3
    for part in found:
        assert [expected[p] for p in part] == sorted((expected[p] for p in part), reverse=True)


def test_siblings_stay_together_where_there_is_enough_to_balance_and_only_there() -> None:
    requests = [prompt for prompt in prompts_of(4, 9, 6, 2, 5, 8, 3, 7) for _ in range(4)]
    for part in shares(requests, ExpectedLengths().expected(requests), 2):
        assert [place // 4 for place in part[::4]] == [place // 4 for place in part[3::4]]
    few = prompts_of(4)[:1] * 4
    assert [len(part) for part in shares(few, [4.0] * 4, 4)] == [1, 1, 1, 1]


def test_each_engine_begins_as_many_as_it_has_room_for_and_the_rest_is_there_once_in_ever_smaller_pieces() -> (
    None
):
    requests = [prompt for prompt in prompts_of(*range(30, 2, -1)) for _ in range(6)]
    expected = ExpectedLengths().expected(requests)
    first, rest = ordered(requests, expected, 2, 12)
    assert [len(part) for part in first] == [12, 12]
    assert sorted(place for part in (*first, *rest) for place in part) == list(range(len(requests)))
    assert max(expected[place] for piece in rest for place in piece) <= min(
        expected[part[-1]] for part in first
    )
    sizes = [len(piece) for piece in rest]
    assert [expected[piece[0]] for piece in rest] == sorted(
        (expected[piece[0]] for piece in rest), reverse=True
    )
    assert sizes[0] == 6 and sizes[-12:] == [1] * 12
    assert all(len({place // 6 for place in piece}) == 1 for piece in rest), (
        "a piece is of one prompt"
    )


def test_an_engine_that_one_process_asks_takes_its_own_then_the_rest_and_then_what_another_cannot_begin() -> (
    None
):
    waiting = Waiting(RequestOrder([[0, 1], [2, 3, 4, 5]], [[6, 7]]))
    assert list(waiting.taken({0: 3, 1: 2})) == [(0, 0), (0, 1), (0, 6), (1, 2), (1, 3)]
    assert list(waiting.taken({0: 2})) == [(0, 7), (0, 4)], "the second has no room"
    assert list(waiting.taken({})) == []
    assert list(waiting.taken({0: 9, 1: 1})) == [(1, 5)], "it begins its own itself, where it can"
    waiting = Waiting(RequestOrder([[0, 1], [2]], [[6, 7]]))
    assert list(waiting.taken({0: 1})) == [(0, 0)]
    assert list(waiting.taken({1: 2})) == [(1, 2), (1, 6)], (
        "the first takes no piece while it has its own"
    )


def test_a_further_turn_is_begun_first_and_by_its_own_engine_alone() -> None:
    waiting = Waiting(RequestOrder([[0, 1], [2]], [[6, 7]]))
    waiting.add(1, 9)
    assert list(waiting.taken({0: 9})) == [(0, 0), (0, 1), (0, 6), (0, 7), (0, 2)]
    assert list(waiting.taken({0: 9})) == []
    waiting = Waiting(RequestOrder([[0, 1], [2]], []))
    waiting.add(1, 9)
    assert list(waiting.taken({1: 1})) == [(1, 9)]


def test_new_prompts_are_expected_to_be_answered_in_proportion_and_known_ones_as_last_time() -> (
    None
):
    prompts = prompts_of(2, 4, 6)
    seen = ExpectedLengths()
    assert seen.expected(prompts) == [2, 4, 6]
    seen.learn(prompts[:2] * 2, completions_of([10, 20, 30, 40]))  # 100 tokens to 12 of prompts
    assert seen.expected(prompts) == pytest.approx([20, 30, 50])
    seen.learn(prompts[:1], completions_of([1]))
    assert seen.expected(prompts[:2]) == [1, 30]


def test_a_prompt_with_an_answer_that_was_broken_off_stays_as_it_was() -> None:
    prompts = prompts_of(2, 2)
    seen = ExpectedLengths()
    seen.learn([prompts[0]] * 2, completions_of([8, 8]))
    seen.learn([prompts[0], prompts[0], prompts[1]], [completions_of([2])[0], None, None])
    assert seen.expected(prompts) == [8, 8]


def test_what_is_expected_comes_back_from_a_state() -> None:
    prompts = prompts_of(2, 5, 3)
    seen, again = ExpectedLengths(), ExpectedLengths()
    seen.learn(prompts[:2], completions_of([3, 9]))
    again.load_state(seen.state())
    assert again.expected(prompts) == seen.expected(prompts)
    assert again.expected(prompts)[0] == 3
    # as format 2 has the first prompt
    again.load_state({"answers": {"83e7cb593f452c57": 4.0}, "tokens": [5, 3]})
    assert again.expected(prompts)[0] == 4


def test_what_a_run_remembers_has_an_end_and_the_prompts_asked_last_stay() -> None:
    prompts, again = prompts_of(2, 2, 2, 2), ExpectedLengths(2)
    seen = ExpectedLengths(2)
    seen.learn(prompts[:2], completions_of([5, 6]))
    seen.learn([prompts[0], prompts[2]], completions_of([7, 8]))
    scale = 26 / 8
    assert seen.expected(prompts) == pytest.approx([7, 2 * scale, 8, 2 * scale])
    again.load_state(seen.state())
    for one in (seen, again):
        one.learn(prompts[3:], completions_of([9]))
        assert one.expected(prompts) == pytest.approx([2 * 35 / 10, 2 * 35 / 10, 8, 9])
    assert seen.state()["means"].tolist() == again.state()["means"].tolist() == [8, 9]
