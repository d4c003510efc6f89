from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Rollout, Rows, Samples
from rftmega.trainer import DynamicSampler
from rftmega.trainer.experience import collect
from rftmega.trainer.group_collector import GroupCollector, Wanted
from rftmega.trainer.prompt_queue import PromptQueue
from tests.columns import ragged
from tests.rollouts import answered

# What the two answers of a prompt score, by the prompt's number: only those of 3, 5 and 8 differ.
SCORES = {3: (0.0, 1.0), 5: (1.0, 0.0), 8: (0.5, 0.0)}


class Rounds:
    """Answers of 1 + number tokens, so that rounds differ in width."""

    def __init__(self) -> None:
        self.number = -1

    def __call__(self, prompts: Sequence[Prompt], wanted: Wanted | None = None) -> Samples[Ragged]:
        self.number += 1
        return answered_by(prompts, self.number)


def answered_by(prompts: Sequence[Prompt], number: int) -> Samples[Ragged]:
    size = 2 * len(prompts)
    index = torch.tensor([prompt.index for prompt in prompts for _ in range(2)])
    reward = torch.tensor(
        [score for prompt in prompts for score in SCORES.get(prompt.index, (0.1, 0.1))]
    )
    lengths = torch.full((size,), 2 + number)
    rows = Rows.of_completions(
        index[:, None].expand(size, 2 + number), torch.ones(size, dtype=torch.int64), lengths
    )
    logp = torch.full((size, 1 + number), -1.0)
    flag = torch.zeros(size, dtype=torch.bool)
    asked = [prompt for prompt in prompts for _ in range(2)]
    group = torch.arange(size) // 2
    return Samples(asked, rows.ragged(), ragged(logp), reward, group, flag, {"format": 1 - reward})


def batches(*numbers: int) -> PromptQueue:
    return PromptQueue([[Prompt((1,), index=n), Prompt((1,), index=n + 1)] for n in numbers])


def kept(samples: Samples[Ragged]) -> list[int]:
    return [int(row[0]) for row in samples.rows.tokens]


def test_groups_that_agree_are_replaced_until_the_batch_is_full() -> None:
    more = batches(5, 8)
    samples, seen = DynamicSampler(9)(Rounds(), next(batches(2)), more)
    assert kept(samples) == [3, 3, 5, 5], "groups stay whole and in order"
    assert samples.group.tolist() == [1, 1, 2, 2]
    assert samples.rows.lengths.tolist() == [2, 2, 3, 3]
    assert [row.tolist() for row in samples.behaviour_logp] == [[-1], [-1], [-1, -1], [-1, -1]]
    assert (seen["refills"], seen["groups_left_out"]) == (1.0, 2.0)
    assert seen["reward"] == pytest.approx((4 * 0.1 + 2 * 1.0 + 0.0) / 8), (
        "of all answers, kept or not"
    )
    assert next(more)[0].index == 8, "no prompt is drawn that is not needed"


def test_what_is_too_many_is_left_out() -> None:
    samples, _ = DynamicSampler(9)(Rounds(), next(batches(4)), batches(8, 3, 5))
    assert kept(samples) == [5, 5, 8, 8]


@pytest.mark.parametrize(("rounds", "more"), [(2, (0, 10, 3)), (9, (0, 10))])
def test_after_the_last_round_it_goes_on_with_what_there_is(
    rounds: int, more: tuple[int, ...]
) -> None:
    samples, seen = DynamicSampler(rounds)(Rounds(), next(batches(2)), batches(*more))
    assert kept(samples) == [3, 3]
    assert seen["refills"] == 2


def test_where_no_group_differs_one_stays_so_that_a_step_can_be_made() -> None:
    samples, _ = DynamicSampler(1)(Rounds(), next(batches(0)), batches(10))
    assert kept(samples) == [0, 0]


def test_another_part_of_the_reward_can_decide() -> None:
    samples, _ = DynamicSampler(1, part="format")(Rounds(), next(batches(2)), batches(10))
    assert kept(samples) == [3, 3]


def test_without_rounds_every_group_stays() -> None:
    samples, seen = DynamicSampler(0)(Rounds(), next(batches(0)), batches(3))
    assert kept(samples) == [0, 0, 1, 1]
    assert "refills" not in seen


def test_rounds_whose_answers_have_other_parts_are_joined() -> None:
    rounds = Rounds()

    def by_kind(prompts: Sequence[Prompt], wanted: Wanted | None = None) -> Samples[Ragged]:
        samples = rounds(prompts)
        return replace(
            samples, reward_parts={f"part {rounds.number}": torch.ones(2 * len(prompts))}
        )

    samples, seen = DynamicSampler(9)(by_kind, next(batches(2)), batches(5))
    assert samples.part("part 0").nan_to_num(-1).tolist() == [1, 1, -1, -1]
    assert seen["reward_part 1"] == 1.0


def in_part(answered: Sequence[int]) -> tuple[Callable[..., Samples], list[tuple[list[int], int]]]:
    """Finishes only the groups at these places of a round; and what was asked for, with how many
    were wanted.
    """
    asked: list[tuple[list[int], int]] = []
    rounds = Rounds()

    def some(prompts: Sequence[Prompt], wanted: Wanted | None = None) -> Samples[Ragged]:
        assert wanted is not None
        asked.append(([prompt.index for prompt in prompts], wanted.groups))
        samples = rounds(prompts)
        places = torch.isin(
            samples.group, torch.tensor([place for place in answered if place < len(prompts)])
        )
        return samples.select(places.nonzero()[:, 0])

    return some, asked


def test_what_was_not_finished_or_too_many_comes_again_first_and_in_order() -> None:
    more = batches(4, 6, 8, 10)
    some, asked = in_part([1, 3, 4])  # of 2 ... 7: 3 and 5 differ, 6 does not
    samples, seen = DynamicSampler(9, oversample=3.0)(some, next(batches(2)), more)
    assert asked == [([2, 3, 4, 5, 6, 7], 2)]
    assert kept(samples) == [3, 3, 5, 5]
    assert [prompt.index for prompt in more.take(5)] == [2, 4, 7, 8, 9]
    assert (seen["groups_left_out"], seen["groups_put_back"], seen["refills"]) == (1, 3, 0)
    more = batches(5, 3, 8, 10)
    everything, asked = in_part(range(6))
    samples, seen = DynamicSampler(9, oversample=2.5)(everything, next(batches(2)), more)
    assert asked == [([2, 3, 5, 6, 3], 2)]
    assert kept(samples) == [3, 3, 5, 5], "the first in the prompts' order"
    assert [prompt.index for prompt in more.take(3)] == [3, 4, 8], (
        "a good group too many is not lost"
    )


def test_a_later_round_wants_only_what_is_missing() -> None:
    everything, asked = in_part(range(6))
    samples, seen = DynamicSampler(9, oversample=2.0)(
        everything, next(batches(2)), batches(0, 10, 12, 5, 8)
    )
    assert asked == [([2, 3, 0, 1], 2), ([10, 11, 12, 13], 1), ([5, 6, 8, 9], 1)]
    assert kept(samples) == [3, 3, 5, 5]
    assert seen["refills"] == 2


def test_groups_are_good_enough_when_they_are_whole_and_each_is_looked_at_once() -> None:
    looked: list[list[int]] = []

    def good(samples: Samples) -> bool:
        looked.append(samples.group.tolist())
        return bool(samples.reward.max() > samples.reward.min())

    def score(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        return [{"reward": float(rollout.response_ids[0])} for rollout in rollouts]

    requests = [Prompt((1,), index=n) for n in range(3) for _ in range(3)]
    groups = GroupCollector(requests, score, 3)
    completions: list[Rollout | None] = [None] * 9
    enough = groups.until(Wanted(1, good))

    def arrive(place: int, token: int) -> bool:
        completions[place] = answered((token,), (0.0,), "stop", 0)
        return enough(completions)

    assert not any(arrive(place, 5) for place in (3, 4))
    assert not arrive(5, 5)
    assert looked == [[1, 1, 1]]
    assert not any([arrive(6, 1), arrive(7, 2), arrive(0, 1)])
    assert arrive(8, 1)
    assert looked == [[1, 1, 1], [2, 2, 2]]
    whole = groups.collected(completions)
    assert (whole.group.tolist(), whole.reward.tolist()) == ([1, 1, 1, 2, 2, 2], [5, 5, 5, 1, 2, 1])


def test_of_groups_the_answers_that_are_trained_from_must_differ_and_metrics_are_of_all() -> None:
    """Groups 0 and 1 differ in their third answer only, group 2 in the first two."""
    rewards = {0: [5.0, 5.0, 9.0], 1: [1.0, 1.0, 0.0], 2: [0.0, 1.0, 1.0]}

    def ask(prompts: Sequence[Prompt], wanted: Wanted | None) -> Samples[Ragged]:
        return scored([rewards[prompt.index] for prompt in prompts])

    prompts = [Prompt((1,), index=n) for n in range(3)]
    samples, seen = DynamicSampler(1, train_samples=2)(ask, prompts, PromptQueue([]))
    assert samples.reward.tolist() == [0, 1]
    assert seen["groups_left_out"] == 2
    assert seen["reward"] == pytest.approx(sum(map(sum, rewards.values())) / 9)
    assert DynamicSampler(1)(ask, prompts, PromptQueue([]))[0].reward.tolist() == [
        5,
        5,
        9,
        1,
        1,
        0,
        0,
        1,
        1,
    ]


def scored(groups: Sequence[Sequence[float]]) -> Samples[Ragged]:
    """Answers of one token."""
    size = len(groups[0])
    requests = [Prompt((1,)) for _ in groups for _ in range(size)]
    completions = [answered((2,)) for _ in requests]
    rewards = iter([reward for group in groups for reward in group])
    return collect(
        requests,
        completions,
        lambda *_: [{"reward": next(rewards)} for _ in requests],
        samples_per_prompt=size,
    )


def test_a_supply_goes_on_from_its_state_with_what_was_put_back() -> None:
    first, again = batches(0, 2, 4, 6), batches(6)
    next(first)
    taken = first.take(3)
    first.put_back(taken[1:])
    again.load_state(first.state())
    assert [[prompt.index for prompt in batch] for batch in again] == [[3, 4], [5, 6], [7]]
    assert [[prompt.index for prompt in batch] for batch in first] == [[3, 4], [5, 6], [7]]
    assert first.take(1) == []


def test_a_resumed_supply_gives_as_many_prompts_a_batch_as_its_own_source() -> None:
    first = batches(0, 2, 4, 6)
    next(first)
    first.put_back(first.take(1))
    larger = PromptQueue([[Prompt((1,), index=n) for n in range(4, 8)]])
    larger.load_state(first.state())
    assert [[prompt.index for prompt in batch] for batch in larger] == [[2, 3, 4, 5], [6, 7]]
