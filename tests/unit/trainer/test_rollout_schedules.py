"""Answers that are generated while the trainer learns: how old they may be, that none is learnt from
twice, and that a resume loses none.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.losses import policy_loss
from rftmega.core.errors import Preempted
from rftmega.core.interfaces import RolloutGroup, TakenGroups
from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.monitoring.observers.observer import Observer
from rftmega.trainer import DynamicSampler, Learner, PPOTrainer
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.journal import Journal
from rftmega.trainer.ppo import StepParts, StepSampling
from rftmega.trainer.rollout_schedules import Asynchronous, OneAhead, Synchronous
from tests.unit.trainer.test_step import Bigrams, likes_seven, rollout_of

BATCH, SAMPLES = 3, 4


class Streams(Bigrams):
    """Groups answer when they begin, and end after so many pushes as `delay` says."""

    pauses_between_takes = False

    def __init__(self, delay: Callable[[int], int] = lambda number: 0):
        super().__init__()
        self.delay = delay
        self.under: dict[int, RolloutGroup] = {}
        self.due: dict[int, int] = {}
        self.completions: dict[int, list[Rollout]] = {}
        self.begun: list[int] = []

    @property
    def under_way(self) -> list[RolloutGroup]:
        return [*self.under.values()]

    def begin(self, groups: Any, *, sampling: Sampling, reward: Any) -> None:
        for group in groups:
            own = [self._completion(group.prompt, seed, sampling) for seed in group.seeds]
            rollouts = [rollout_of(group.prompt, completion) for completion in own]
            self.put(group, rollouts)
            self.due[group.number] += self.delay(group.number)
            self.begun.append(group.number)

    def put(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> None:
        self.under[group.number], self.completions[group.number] = group, list(rollouts)
        self.due[group.number] = len(self.versions)

    def take(self, most: int) -> TakenGroups:
        return self.take_these(sorted(self.under, key=lambda number: self.due[number])[:most])

    def take_these(self, numbers: Sequence[int]) -> TakenGroups:
        rollouts = [rollout for number in numbers for rollout in self.completions[number]]
        return TakenGroups(self.forget(numbers), rollouts)

    def forget(self, numbers: Sequence[int]) -> list[RolloutGroup]:
        self.completions = {
            number: own for number, own in self.completions.items() if number not in numbers
        }
        return [self.under.pop(number) for number in numbers]

    def join(self) -> None:
        self.due = dict.fromkeys(self.due, 0)

    def drop(self, oldest: int) -> list[RolloutGroup]:
        versions = {number: min(own[0].versions) for number, own in self.completions.items()}
        old = [number for number, version in versions.items() if version < oldest]
        return self.forget(old)

    def ended(self) -> dict[int, list[Rollout]]:
        there = [number for number in self.under if self.due[number] <= len(self.versions)]
        return {number: self.completions[number] for number in there}

    def unfinished(self) -> Callable[[], dict[str, Any]]:
        return dict

    def load_unfinished(self, state: dict[str, Any]) -> None: ...


class Trained(Observer):
    """What each step has learnt from: tasks, and versions of tokens."""

    def __init__(self) -> None:
        self.tasks: list[list[int]] = []
        self.versions: list[set[int]] = []
        self.metrics: list[dict[str, float]] = []

    def on_experience(self, trainer: Any, samples: Any, experience: Any) -> None:
        self.tasks.append([prompt.task for prompt in samples.prompts][::SAMPLES])
        self.versions.append(set(samples.versions.flat[samples.rows.mask.flat].tolist()))

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.metrics.append(dict(metrics))


@dataclass
class Made:
    trainer: PPOTrainer
    policy: Any
    trained: Trained

    def fit(self, steps: int, skip: int = 0) -> "Made":
        batches = (
            [Prompt((1 + (BATCH * step + place) % 5,)) for place in range(BATCH)]
            for step in itertools.count(skip)
        )
        self.trainer.fit(batches, steps=steps)
        return self


def made(
    policy: Any,
    schedule: Callable[[Any, Journal | None], Synchronous],
    *,
    refill: DynamicSampler | None = None,
    journal: Journal | None = None,
) -> Made:
    trained = Trained()
    parts = StepParts(
        refill=refill or DynamicSampler(0), schedule=schedule(policy, journal), journal=journal
    )
    trainer = PPOTrainer(
        engine=policy, weights=policy, reward=likes_seven, maker=ExperienceMaker(policy),
        learner=Learner(policy, policy_loss(), journal=journal), sampling=StepSampling(SAMPLES, 1.0, seed=3), parts=parts,
        callbacks=[trained], stop=lambda: False,
    )  # fmt: skip
    return Made(trainer, policy, trained)


def asynchronous(most: int) -> Callable[[Any, Journal | None], Synchronous]:
    return lambda stream, journal: Asynchronous(stream, journal, max_staleness=most)


def delayed(number: int) -> int:
    """Most groups end at once, some after one, three or nine pushes."""
    return (0, 0, 1, 0, 3, 0, 0, 9)[number % 8]


def test_at_bound_0_the_stream_learns_what_the_synchronous_step_learns_bit_for_bit() -> None:
    one = made(Bigrams(), lambda stream, journal: Synchronous()).fit(12)
    other = made(Streams(), asynchronous(0)).fit(12)
    assert torch.equal(one.policy.table, other.policy.table)
    assert one.trained.tasks == other.trained.tasks
    assert {metrics["staleness_max"] for metrics in other.trained.metrics} == {0.0}


class Lagging(Bigrams):
    """Answers under the weights of the push before the last, but for the first answers."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[Tensor] = []

    def push(self, *, version: int) -> dict[str, float]:
        self.pushed.append(self.table.detach().clone())
        return super().push(version=version)

    def _completion(self, prompt: Prompt, seed: int, sampling: Sampling) -> Any:
        now, self.table = self.table, self.pushed[max(len(self.pushed) - 2, 0)]
        versions, self.versions = self.versions, self.versions[:-1] or self.versions
        found = super()._completion(prompt, seed, sampling)
        self.table, self.versions = now, versions
        return found


class OneBehind(Synchronous):
    max_staleness = 1


def test_one_ahead_learns_from_what_the_weights_before_have_answered() -> None:
    one = made(Lagging(), lambda stream, journal: OneBehind()).fit(9)
    other = made(Streams(), OneAhead).fit(9)
    assert torch.equal(one.policy.table, other.policy.table)
    assert other.trained.versions == [{0}, *({step} for step in range(8))]
    assert other.policy.begun == [*range(BATCH, BATCH * 9)], (
        "a batch that nobody learns from was begun"
    )


@pytest.mark.parametrize("most", [0, 1, 2, 4])
def test_every_group_is_trained_once_dropped_or_under_way_and_none_is_too_old(most: int) -> None:
    run = made(Streams(delayed), asynchronous(most)).fit(30)
    trained = [task for tasks in run.trained.tasks for task in tasks]
    assert len(trained) == len(set(trained)) == 30 * BATCH
    dropped = int(sum(metrics["groups_dropped"] for metrics in run.trained.metrics))
    assert len(run.policy.begun) == len(trained) + dropped + len(run.policy.under)
    assert len(run.policy.under) == most * BATCH
    for step, versions in enumerate(run.trained.versions):
        assert min(versions) >= step - most and max(versions) <= step
        assert run.trained.metrics[step]["staleness_max"] == step - min(versions)
    assert (dropped > 0) == (0 < most < 8), "long ones go where nobody may wait for them"


def test_groups_that_do_not_differ_are_left_out_and_others_are_trained() -> None:
    run = made(Streams(delayed), asynchronous(2), refill=DynamicSampler(30)).fit(6)
    assert [len(tasks) for tasks in run.trained.tasks] == [BATCH] * 6
    left_out = sum(metrics["groups_left_out"] for metrics in run.trained.metrics)
    begun, trained = len(run.policy.begun), 6 * BATCH
    dropped = sum(metrics["groups_dropped"] for metrics in run.trained.metrics)
    assert left_out > 0 and begun == trained + left_out + dropped + len(run.policy.under)


def test_a_step_looks_at_no_more_groups_than_its_rounds_allow() -> None:
    refill = DynamicSampler(2)
    nothing, looked = torch.zeros(0, dtype=torch.long), itertools.count()

    def good(samples: Any) -> Any:
        assert next(looked) < 3 * 3 * BATCH, "a step looks for others for ever"
        return samples.select(nothing)

    refill.good = good  # type: ignore[method-assign]
    run = made(Streams(delayed), asynchronous(2), refill=refill).fit(3)
    assert [metrics["groups_left_out"] for metrics in run.trained.metrics] == [3.0 * BATCH] * 3


def saved(run: Made) -> Any:
    """The state as a checkpoint has it: JSON but for tensors."""

    def without(state: Any) -> Any:
        if isinstance(state, dict):
            return {name: without(value) for name, value in state.items()}
        if isinstance(state, list | tuple):
            return [without(value) for value in state]
        return "tensor" if isinstance(state, Tensor) else state

    state = run.trainer.state()
    json.dumps(without(state))
    return state


@pytest.mark.parametrize(
    "schedule", [OneAhead, asynchronous(2), asynchronous(4)], ids=["one ahead", "2", "4"]
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(schedule: Any) -> None:
    whole = made(Streams(), schedule).fit(12)
    before = made(Streams(), schedule)
    before.trainer.last = 12  # it was stopped, not done
    before.trainer.fit = None  # type: ignore[method-assign]
    supply = before.trainer.prepare(
        [Prompt((1 + (BATCH * step + place) % 5,)) for place in range(BATCH)] for step in range(12)
    )
    drawn = 0
    for _, batch in zip(range(5), supply, strict=False):
        before.trainer.train_step(batch)
    state = saved(before)
    drawn = state["supply"]["drawn"] // BATCH
    after = made(Streams(), schedule)
    after.policy.table.data.copy_(before.policy.table)
    after.policy.versions = [5]  # as the push before the first step says
    after.trainer.load_state(state)
    after.fit(12, skip=drawn)
    torch.testing.assert_close(after.policy.table, whole.policy.table, rtol=0, atol=0)
    assert [*before.trained.tasks, *after.trained.tasks] == whole.trained.tasks
    begun = [*before.policy.begun, *after.policy.begun]
    assert len(begun) == len(set(begun)), "what has ended was rolled out again"


def test_a_step_that_was_broken_off_behind_its_groups_goes_on_with_them() -> None:
    """Stopped once groups were taken: the next run learns from these, though its stream has them
    under way as the checkpoint says.
    """
    whole = made(Streams(delayed), asynchronous(2)).fit(6)

    asked = iter([False] * 3 + [True] * 100)
    journal = Journal(lambda: next(asked))
    broken = made(Streams(delayed), asynchronous(2), journal=journal)
    broken.trainer.last = 6
    supply = broken.trainer.prepare(
        [Prompt((1 + (BATCH * step + place) % 5,)) for place in range(BATCH)] for step in range(6)
    )
    state = saved(broken)
    journal.begin()
    with suppress(Preempted):
        for batch in supply:
            broken.trainer.train_step(batch)
            state = saved(broken)
            journal.begin()
    assert broken.trainer.step < 6
    within = journal.state()
    assert any("groups" in name for name, _ in within)

    goes_on = Journal()
    after = made(Streams(delayed), asynchronous(2), journal=goes_on)
    after.policy.table.data.copy_(broken.policy.table)
    after.policy.versions = [state["step"]]
    after.trainer.load_state(state)
    goes_on.load_state(within)
    after.fit(6, skip=state["supply"]["drawn"] // BATCH)
    trained = [task for tasks in (*broken.trained.tasks, *after.trained.tasks) for task in tasks]
    assert len(trained) == len(set(trained)) == 6 * BATCH
    assert after.trained.tasks[0] == whole.trained.tasks[len(broken.trained.tasks)]


SCHEDULES: dict[str, Any] = {
    "in the step": lambda stream, journal: Synchronous(),
    "one ahead": OneAhead,
    "bound 2": asynchronous(2),
}


@pytest.mark.parametrize("before", ["one ahead", "bound 2"])
@pytest.mark.parametrize("after", SCHEDULES)
def test_a_run_resumed_under_another_schedule_learns_what_was_under_way_first(
    before: str, after: str
) -> None:
    first = made(Streams(delayed), SCHEDULES[before])
    first.trainer.last = 30
    supply = first.trainer.prepare(
        [Prompt((1 + place % 5,)) for place in range(BATCH)] for _ in range(30)
    )
    for _, batch in zip(range(5), supply, strict=False):
        first.trainer.train_step(batch)
    state = saved(first)
    done = [task for tasks in first.trained.tasks for task in tasks]
    under_way = {number for number, *_ in state["schedule"]["under_way"]}
    assert under_way and not under_way & set(done)
    second = made(Streams(), SCHEDULES[after])
    second.policy.versions = [5]
    second.trainer.load_state(state)
    second.fit(30)
    again = [task for tasks in second.trained.tasks for task in tasks]
    assert len(set(done + again)) == len(done + again), "learnt twice"
    if before != after:
        assert under_way <= set(again[: -(-len(under_way) // BATCH) * BATCH]), "lost"
    drawn = set(range(state["supply"]["drawn"])) - {
        Prompt.from_state(prompt).task for prompt in state["supply"]["waiting"]
    }
    dropped = drawn - set(done) - under_way
    lost = set(range(max(again))) - set(done + again) - {*second.policy.under}
    assert len(lost - dropped) == sum(
        each.get("groups_dropped", 0) for each in second.trained.metrics
    )
