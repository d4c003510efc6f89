from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from rftmega.trainer import Refill
from rftmega.types import Prompt, Rows, Samples

# What the two answers of a prompt score, by the prompt's number: only those of 3, 5 and 8 differ.
SCORES = {3: (0.0, 1.0), 5: (1.0, 0.0), 8: (0.5, 0.0)}


def ask(prompts: Sequence[Prompt], number: int) -> Samples:
    """Answers of 1 + number tokens, so that rounds differ in width."""
    size = 2 * len(prompts)
    index = torch.tensor([prompt.index for prompt in prompts for _ in range(2)])
    reward = torch.tensor([score for prompt in prompts for score in SCORES.get(prompt.index, (0.1, 0.1))])
    lengths = torch.full((size,), 2 + number)
    rows = Rows(index[:, None].expand(size, 2 + number), torch.ones(size, dtype=torch.int64), lengths)
    logp = torch.full((size, 1 + number), -1.0)
    flag = torch.zeros(size, dtype=torch.bool)
    asked = [prompt for prompt in prompts for _ in range(2)]
    return Samples(asked, rows, logp, reward, torch.arange(size) // 2, flag, {"format": 1 - reward})


def batches(*numbers: int) -> Iterator[list[Prompt]]:
    return iter([[Prompt((1,), index=n), Prompt((1,), index=n + 1)] for n in numbers])


def kept(samples: Samples) -> list[int]:
    return samples.rows.tokens[:, 0].tolist()


def test_groups_that_agree_are_replaced_until_the_batch_is_full() -> None:
    more = batches(5, 8)
    samples, seen = Refill(9)(ask, next(batches(2)), more)
    assert kept(samples) == [3, 3, 5, 5], "groups stay whole and in order"
    assert samples.group.tolist() == [1, 1, 2, 2]
    assert samples.rows.lengths.tolist() == [2, 2, 3, 3]
    assert samples.behaviour_logp.tolist() == [[-1, 0], [-1, 0], [-1, -1], [-1, -1]]
    assert (seen["refills"], seen["groups_left_out"]) == (1.0, 2.0)
    assert seen["reward"] == pytest.approx((4 * 0.1 + 2 * 1.0 + 0.0) / 8), "of all answers, kept or not"
    assert next(more)[0].index == 8, "no prompt is drawn that is not needed"


def test_what_is_too_many_is_left_out() -> None:
    samples, _ = Refill(9)(ask, next(batches(4)), batches(8, 3, 5))
    assert kept(samples) == [5, 5, 8, 8]


@pytest.mark.parametrize(("rounds", "more"), [(2, (0, 10, 3)), (9, (0, 10))])
def test_after_the_last_round_it_goes_on_with_what_there_is(rounds: int, more: tuple[int, ...]) -> None:
    samples, seen = Refill(rounds)(ask, next(batches(2)), batches(*more))
    assert kept(samples) == [3, 3]
    assert seen["refills"] == 2


def test_where_no_group_differs_one_stays_so_that_a_step_can_be_made() -> None:
    samples, _ = Refill(1)(ask, next(batches(0)), batches(10))
    assert kept(samples) == [0, 0]


def test_another_part_of_the_reward_can_decide() -> None:
    samples, _ = Refill(1, part="format")(ask, next(batches(2)), batches(10))
    assert kept(samples) == [3, 3]


def test_without_rounds_every_group_stays() -> None:
    samples, seen = Refill(0)(ask, next(batches(0)), batches(3))
    assert kept(samples) == [0, 0, 1, 1]
    assert "refills" not in seen


def test_rounds_whose_answers_have_other_parts_are_joined() -> None:
    def by_kind(prompts: Sequence[Prompt], number: int) -> Samples:
        return replace(ask(prompts, number), reward_parts={f"part {number}": torch.ones(2 * len(prompts))})

    samples, seen = Refill(9)(by_kind, next(batches(2)), batches(5))
    assert samples.part("part 0").nan_to_num(-1).tolist() == [1, 1, -1, -1]
    assert seen["reward_part 1"] == 1.0
