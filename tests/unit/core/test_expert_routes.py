"""Which experts tokens were sent to: over turns, over parts of an answer, in columns and batches."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.ragged import Ragged
from rftmega.core.rollout_arrays import RolloutArrays, packed_completions, unpacked_completions
from rftmega.core.types import Completion, Prompt, Rollout, Trajectory
from rftmega.rollout.pool.gathered_rollouts import gathered
from rftmega.rollout.requests.partial_completion import PartialCompletion
from rftmega.runtime.parallel.host_memory import HostMemory
from rftmega.trainer.experience.samples import collect

NOBODY = 255  # stands for an expert that nobody told of


def routes(*numbers: int, kind: torch.dtype = torch.uint8) -> Tensor:
    """Of one layer and two experts a token: n and n + 1."""
    return torch.tensor([[[n, n + 1]] for n in numbers], dtype=kind)


def completion(ids: list[int], told: Tensor | None) -> Completion:
    return Completion(ids, [-1.0] * len(ids), "stop", 1, routes=told)


def first(told: Tensor | None) -> list[int]:
    assert told is not None
    return told[:, 0, 0].tolist()


def test_experts_are_numbered_in_the_smallest_integers_that_leave_one_for_nobody() -> None:
    kinds = [expert_routes.kind_of(experts) for experts in (8, 255, 256, 384)]
    assert kinds == [torch.uint8, torch.uint8, torch.int16, torch.int16]
    assert [expert_routes.unknown(kind) for kind in kinds[1:3]] == [255, 32767]


def test_a_token_of_several_turns_keeps_the_experts_that_it_was_first_sent_to() -> None:
    # prompt 1 2, answer 3 4, reply 5 6, answer 7: the second turn is fed the first one's tokens again
    one, two = (
        completion([3, 4], routes(10, 11, 12)),
        completion([7], routes(20, 21, 22, 23, 24, 25)),
    )
    row = Trajectory.of([1, 2], one, [5, 6], two)
    assert first(row.routes) == [10, 11, 12, 23, 24, 25, NOBODY]
    silent = Trajectory.of([1, 2], completion([3, 4], None), [5, 6], two)
    assert first(silent.routes) == [20, 21, 22, 23, 24, 25, NOBODY]
    late = Trajectory.of([1, 2], one, [5, 6], completion([7], None))
    assert first(late.routes) == [10, 11, 12, *[NOBODY] * 4]
    assert Trajectory.of([1, 2], completion([3], None)).routes is None


def test_routes_of_another_context_are_left_out() -> None:
    assert Trajectory.of([1, 2], completion([3, 4], routes(10, 11))).routes is None


def test_an_answer_in_parts_keeps_what_the_earlier_weights_chose() -> None:
    before = PartialCompletion.of(completion([3, 4], routes(10, 11, 12)))
    after = PartialCompletion.of(completion([5], routes(20, 21, 22, 23)))
    assert first(before.with_more(after).whole().routes) == [10, 11, 12, 23]
    assert first(PartialCompletion().with_more(after).whole().routes) == [20, 21, 22, 23]


def rollouts() -> list[Rollout]:
    told = Trajectory.of([1, 2], completion([3, 4], routes(10, 11, 12)))
    silent = Trajectory.of([5], completion([6], None))
    short = Trajectory.of([7], completion([8, 9], routes(30, 31)))
    return [Rollout((told, silent), {"reward": 1.0}), Rollout((short,), {"reward": 0.0})]


def test_columns_hold_them_where_any_trajectory_has_some() -> None:
    arrays = RolloutArrays.of(rollouts())
    again = unpacked_completions(packed_completions(arrays))
    where, everybodys, _ = gathered(dict(enumerate(arrays)), HostMemory())  # type: ignore[arg-type]
    for found in (arrays, again, everybodys):
        told = [own.routes for each in found for own in each.trajectories]  # type: ignore[union-attr]
        assert list(map(first, told)) == [[10, 11, 12, NOBODY], [NOBODY] * 2, [30, 31, NOBODY]]
    assert where == {0: 0, 1: 1}
    without = [Rollout((Trajectory.of([5], completion([6], None)),))]
    assert "routes" not in RolloutArrays.of(without).columns


def test_rows_hold_them_for_every_token_that_is_fed() -> None:
    prompts = [Prompt((1, 2)), Prompt((7,))]
    samples = collect(prompts, rollouts(), reward_of, samples_per_prompt=1)
    rows = samples.rows
    assert isinstance(rows.routes, Ragged)
    assert [first(own) for own in rows.routes] == [[10, 11, 12], [NOBODY], [30, 31]]
    chosen = rows.select(torch.tensor([2, 1])).padded()
    assert chosen.routes is not None and chosen.routes.shape == (2, 2, 1, 2)
    assert chosen.routes[:, :, 0, 0].tolist() == [[30, 31], [NOBODY, NOBODY]]
    back = chosen.ragged().routes
    assert [first(own) for own in back] == [[30, 31], [NOBODY]]
    assert rows.with_end().routes is None, "a value model has routers of its own"
    both = type(samples).join([samples, samples]).rows.routes
    assert [first(own) for own in both] == [[10, 11, 12], [NOBODY], [30, 31]] * 2  # type: ignore[union-attr]


def test_routes_stay_where_rows_without_any_are_joined_to_them() -> None:
    prompts = [Prompt((1, 2)), Prompt((7,))]
    some = collect(prompts, rollouts(), reward_of, samples_per_prompt=1)
    none = some.select(torch.tensor([1]))
    none = replace(none, rows=replace(none.rows, routes=None))
    for parts, wanted in (
        ([some, none], [[10, 11, 12], [NOBODY], [30, 31], [NOBODY]]),
        ([none, some], [[NOBODY], [10, 11, 12], [NOBODY], [30, 31]]),
    ):
        both = type(some).join(parts).rows.routes
        assert [first(own) for own in both] == wanted  # type: ignore[union-attr]
    assert type(some).join([none, none]).rows.routes is None


def test_long_rows_are_padded_alike() -> None:
    """Ragged copies rows one by one where they are long."""
    numbers = torch.arange(2 * 300).view(300, 1, 2) % 200
    long = Ragged.of([numbers.to(torch.uint8), routes(5)])
    padded = long.padded(width=301, fill=NOBODY)
    assert torch.equal(padded[0, :300], numbers.to(torch.uint8))
    assert padded[0, 300].tolist() == [[NOBODY] * 2] and padded[1, 1:].eq(NOBODY).all()
    assert padded[1, 0].tolist() == [[5, 6]]


def reward_of(prompts: Any, found: Any) -> list[dict[str, float]]:
    raise AssertionError("all have scores")


def test_a_batch_without_them_has_none() -> None:
    silent = [Rollout((Trajectory.of([5], completion([6], None)),), {"reward": 1.0})]
    rows = collect([Prompt((5,))], silent, reward_of, samples_per_prompt=1).rows
    assert rows.routes is None and rows.padded().routes is None
    assert replace(rows, routes=None).select(torch.tensor([0])).routes is None
