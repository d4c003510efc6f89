"""Rollout schedules decide when completions are generated: within the step (synchronous), during
the previous step (one-step off-policy), or continuously (asynchronous).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rftmega.core.errors import ConfigError
from rftmega.core.interfaces import RolloutGroup, RolloutStream, TakenGroups
from rftmega.core.ragged import Ragged
from rftmega.core.rollout_arrays import packed_completions, unpacked_completions
from rftmega.core.sampling_seeds import sampling_seed
from rftmega.core.types import Metrics, Prompt, Rollout, Samples
from rftmega.trainer.dynamic_sampler import DynamicSampler, described, groups_in
from rftmega.trainer.experience import complete
from rftmega.trainer.group_collector import Wanted
from rftmega.trainer.journal import Journal
from rftmega.trainer.prompt_queue import PromptQueue
from rftmega.trainer.trained_order import TrainedGroups

log = logging.getLogger(__name__)
LEFT = "what is left under way"


class Rolls(Protocol):
    """Rolls is the part of the trainer's interface that a schedule uses."""

    step: int
    last: int  # training ends before this step
    refill: DynamicSampler
    supply: PromptQueue

    def rollout(
        self, prompts: Sequence[Prompt], wanted: Wanted | None = None
    ) -> Samples[Ragged]: ...

    def groups(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]: ...

    def begin(self, stream: RolloutStream, groups: Sequence[RolloutGroup]) -> None: ...

    def collected(
        self, requests: Sequence[Prompt], rollouts: Sequence[Rollout | None]
    ) -> Samples[Ragged]: ...


class Synchronous:
    """Synchronous generates the completions of a step within the step itself."""

    max_staleness = 0
    joins = False  # whether all completions must arrive before the weights change

    def samples(self, trainer: Rolls, batch: Sequence[Prompt]) -> tuple[Samples[Ragged], Metrics]:
        """Returns the samples to train on in this step, and metrics. `batch`: the step's prompts."""
        return trainer.refill(trainer.rollout, batch, trainer.supply)

    def oldest(self, step: int) -> int:
        """Returns the oldest policy version whose completions may be trained on after `step`
        finished steps.
        """
        return step - self.max_staleness

    def join(self) -> None:
        """Waits until all completions in progress have arrived; this schedule never has any after
        its step's rollout phase.
        """

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, trainer: Rolls, state: dict[str, Any]) -> None:
        """Restores the schedule after a resume. `state`: a value that the method `state()` of any
        schedule returned; prompts that another schedule had in flight and has not trained on are
        put at the head of the trainer's queue.
        """
        prompts = [Prompt.from_state(prompt) for _, prompt, _ in state.get("under_way", ())]
        if lacking := trainer.supply.lacks(prompts):
            trainer.supply.put_back(lacking)
            log.info(
                "%d prompts were under way when the run was saved: they are generated anew, before all others.",
                len(lacking),
            )


class OneAhead(Synchronous):
    """OneAhead (one-step off-policy) generates the completions of the next step while the current
    step trains, and waits for all of them before the weights change: training is deterministic and
    one version off-policy.
    """

    max_staleness = 1
    joins = True

    def __init__(self, stream: RolloutStream, journal: Journal | None):
        self.stream = JournaledStream(stream, journal)

    def samples(self, trainer: Rolls, batch: Sequence[Prompt]) -> tuple[Samples[Ragged], Metrics]:
        def ask(prompts: Sequence[Prompt], wanted: Wanted | None) -> Samples[Ragged]:
            begun = {group.number for group in self.stream.under_way}
            numbers = [prompt.task for prompt in prompts]
            if not begun.issuperset(numbers):
                return trainer.rollout(prompts, wanted)
            return _collected(trainer, self.stream.take_these(numbers))

        samples, seen = trainer.refill(ask, batch, trainer.supply)
        if trainer.step + 1 < trainer.last:
            following = trainer.supply.take(len(batch))
            trainer.supply.put_back(following)  # the next batch
            trainer.begin(self.stream.stream, trainer.groups(following))
        return samples, seen | staleness(samples, trainer.step)

    def join(self) -> None:
        self.stream.join()

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def load_state(self, trainer: Rolls, state: dict[str, Any]) -> None:
        prompts = [Prompt.from_state(prompt) for _, prompt, _ in state["under_way"]]
        if trainer.supply.lacks(prompts):  # of a schedule that takes groups in another order
            super().load_state(trainer, state)
            return
        trainer.begin(self.stream.stream, self.stream.load_state(state))


class Asynchronous(OneAhead):
    """Asynchronous keeps max_staleness + 1 batches of groups in flight, and trains on the groups
    that finish first.

    Of n groups begun so far, at least n - (max_staleness + 1) x batch size have been trained on or
    dropped, so the number of groups in flight is bounded; a group that would be trained on too late
    is dropped before it costs more. (Fu et al., AReaL, arXiv:2505.24298, section 4.1, bound
    staleness by the same count.) `rollout.on_update` determines how requests in flight take new
    weights.
    """

    joins = False

    def __init__(self, stream: RolloutStream, journal: Journal | None, *, max_staleness: int):
        super().__init__(stream, journal)
        self.max_staleness = max_staleness
        self.trained = TrainedGroups([], [], [])  # of the last step

    def load_state(self, trainer: Rolls, state: dict[str, Any]) -> None:
        trainer.supply.forget([number for number, *_ in state["under_way"]])
        trainer.begin(self.stream.stream, self.stream.load_state(state))

    def samples(self, trainer: Rolls, batch: Sequence[Prompt]) -> tuple[Samples[Ragged], Metrics]:
        stream, wanted = self.stream, len(batch)
        under_way = (self.max_staleness + 1) * wanted
        dropped = self._drop(trainer.step)
        trainer.begin(stream.stream, trainer.groups(batch))
        taken: list[TakenGroups] = []
        found: list[Samples[Ragged]] = []
        kept: list[Samples[Ragged]] = []
        left_out = 0
        left = wanted * (1 + trainer.refill.rounds)  # groups that the step may still examine
        # test `left` first: a replayed run begins no groups after a step's last wait either
        while left and (
            missing := self._missing(trainer.step, len(taken), wanted - groups_in(kept))
        ):
            room = max(under_way - len(stream.under_way), 0)
            trainer.begin(stream.stream, trainer.groups(trainer.supply.take(room)))
            most = min(missing, len(stream.under_way), left)
            if not most:
                break
            left -= most
            taken.append(self._take(trainer.step, len(taken), most))
            answered = _collected(trainer, taken[-1])
            good = trainer.refill.good(answered)
            found.append(answered)
            kept.append(good)
            left_out += most - groups_in([good])
        kept = [part for part in kept if len(part)] or [trainer.refill.trained(found[0])]
        samples = Samples.join(kept, trainer.refill.host.once)
        self.trained = TrainedGroups.of(taken, [group.number for group in dropped])
        seen = described(found) | staleness(samples, trainer.step)
        seen["groups_dropped"] = float(len(dropped))
        seen["groups_left_out"] = float(left_out)
        seen["groups_under_way"] = float(len(stream.under_way))
        return samples, seen

    def _drop(self, step: int) -> Sequence[RolloutGroup]:
        """Drops and returns the groups that are too old after `step` finished steps."""
        return self.stream.drop(self.oldest(step))

    def _missing(self, step: int, waits: int, missing: int) -> int:
        """Returns the number of groups that the step waits for next, if it still needs `missing`
        good groups after `waits` waits; 0: the step has enough groups.
        """
        return missing

    def _take(self, step: int, waits: int, most: int) -> TakenGroups:
        """Waits for `most` groups to finish and returns them; `step`: number of finished steps;
        `waits`: number of earlier waits in this step.
        """
        return self.stream.take(most)


class Replayed(Asynchronous):
    """Replayed takes and drops the same groups in the same order as a recorded run; after the end
    of the record it continues like Asynchronous.

    Groups therefore begin in the same steps as in the recorded run. The policy versions that sample
    a group's tokens are not replayed, since they depend on the speed of the engines. Up to the end
    of the record, the run also trains on groups that exceed its max_staleness.
    """

    def __init__(
        self,
        stream: RolloutStream,
        journal: Journal | None,
        *,
        max_staleness: int,
        order: Mapping[int, TrainedGroups],
    ):
        """`order`: number of the step, counted from 1 -> the groups that the recorded run took in
        this step.
        """
        super().__init__(stream, journal, max_staleness=max_staleness)
        self.order = order
        self._ended = False  # whether the end of the record was logged

    def samples(self, trainer: Rolls, batch: Sequence[Prompt]) -> tuple[Samples[Ragged], Metrics]:
        told = self._told(trainer.step)
        samples, seen = super().samples(trainer, batch)
        if told is not None:
            seen["order_version_differs"] = float(self.trained.differing(told))
        return samples, seen

    def oldest(self, step: int) -> int:
        return super().oldest(step) if self._told(step) is None else 0

    def _drop(self, step: int) -> Sequence[RolloutGroup]:
        if (told := self._told(step)) is None:
            return super()._drop(step)
        self._refuse_unknown(step, told.dropped, "drops")
        return self.stream.drop_these(told.dropped)

    def _missing(self, step: int, waits: int, missing: int) -> int:
        if (told := self._told(step)) is None:
            return super()._missing(step, waits, missing)
        return len(told.taken[waits]) if waits < len(told.taken) else 0

    def _take(self, step: int, waits: int, most: int) -> TakenGroups:
        if (told := self._told(step)) is None:
            return super()._take(step, waits, most)
        self._refuse_unknown(step, told.taken[waits], "takes")
        return self.stream.take_these(told.taken[waits])

    def _told(self, step: int) -> TrainedGroups | None:
        """Returns the recorded groups of the step that follows `step` finished steps; None after
        the end of the record. Raises ConfigError if the record begins after this step.
        """
        first, last = min(self.order), max(self.order)
        if step + 1 < first:
            raise ConfigError(
                f"rollout.order begins with step {first}, and this run comes to step {step + 1}. Go on from a checkpoint of "
                f"step {first - 1}, or give a record that begins earlier."
            )
        if step >= last and not self._ended:
            self._ended = True
            log.warning(
                "rollout.order ends with step %d: from step %d on groups are taken as they end.",
                last,
                step + 1,
            )
        return self.order.get(step + 1)

    def _refuse_unknown(self, step: int, numbers: Sequence[int], does: str) -> None:
        begun = {group.number for group in self.stream.under_way}
        if unknown := sorted(set(numbers) - begun):
            raise ConfigError(
                f"rollout.order {does} in step {step + 1} the groups {unknown}, which this run has not under way: it is the "
                "record of a run with other data or options. Give that run's own, or leave rollout.order out."
            )


def staleness(samples: Samples[Ragged], step: int) -> Metrics:
    """Returns the staleness metrics of the trained tokens, in versions behind `step`: mean,
    maximum, the share of tokens with each staleness, and the share of rows with tokens of several
    versions.
    """
    versions, mask = samples.versions, samples.rows.mask
    assert versions is not None
    behind = (step - versions.flat[mask.flat]).long()
    shares = behind.bincount(minlength=1).double() / max(len(behind), 1)
    known = [row[own] for row, own in zip(versions, mask, strict=True)]
    mixed = [float(len(row.unique()) > 1) for row in known]
    seen = {
        "staleness": behind.double().mean().item(),
        "staleness_max": float(behind.max()),
        "mixed_answers": sum(mixed) / max(len(mixed), 1),
    }
    return seen | {f"staleness_{lag}": share for lag, share in enumerate(shares.tolist())}


def groups_of(
    prompts: Sequence[Prompt], *, seed: int, samples_per_prompt: int
) -> list[RolloutGroup]:
    """Returns one group per prompt, with sampling seeds that do not depend on the schedule."""
    samples = range(samples_per_prompt)
    return [
        RolloutGroup(
            prompt.task,
            prompt,
            tuple(sampling_seed(seed, prompt.task, sample) for sample in samples),
        )
        for prompt in prompts
    ]


def _collected(trainer: Rolls, taken: TakenGroups) -> Samples[Ragged]:
    requests = [group.prompt for group in taken.groups for _ in group.seeds]
    return trainer.collected(requests, taken.rollouts)


class JournaledStream:
    """JournaledStream is a RolloutStream that takes groups from before a resume from the journal
    (the record of the step's results), and includes groups in flight in checkpoints.
    """

    def __init__(self, stream: RolloutStream, journal: Journal | None):
        self.stream, self.journal = stream, journal
        self.begin, self.join = stream.begin, stream.join

    @property
    def under_way(self) -> Sequence[RolloutGroup]:
        return self.stream.under_way

    def take(self, most: int) -> TakenGroups:
        taken = self._replayed("groups")
        return taken or self._kept("groups", self.stream.take(most))

    def take_these(self, numbers: Sequence[int]) -> TakenGroups:
        taken = self._replayed("these groups")
        return taken or self._kept("these groups", self.stream.take_these(numbers))

    def drop(self, oldest: int) -> Sequence[RolloutGroup]:
        return self._dropped(lambda: self.stream.drop(oldest))

    def drop_these(self, numbers: Sequence[int]) -> Sequence[RolloutGroup]:
        """Drops and returns the groups with these numbers, regardless of their age."""
        return self._dropped(lambda: self.stream.forget(numbers))

    def _dropped(self, drop: Callable[[], Sequence[RolloutGroup]]) -> Sequence[RolloutGroup]:
        name = "dropped groups"
        if self.journal is not None and self.journal.behind:
            return self.stream.forget(self.journal.replay(name)["numbers"])
        dropped = drop()
        if self.journal is not None:
            self.journal.keep(name, {"numbers": [group.number for group in dropped]})
        return dropped

    def state(self) -> dict[str, Any]:
        """Returns the groups in flight, the rollouts of finished groups in the order in which they
        finished, and the stream's state of unfinished groups.
        """
        return self._snapshot()()

    def _snapshot(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that packs, as `state` does, the groups in flight and finished at the
        time of the call of `_snapshot`.
        """
        under_way, ended = self.under_way, self.stream.ended()
        unfinished = self.stream.unfinished()

        def packed() -> dict[str, Any]:
            groups = [
                [group.number, group.prompt.state(), list(group.seeds)] for group in under_way
            ]
            rollouts = [rollout for own in ended.values() for rollout in own]
            return {
                "under_way": groups,
                "ended": list(ended),
                "rollouts": packed_completions(rollouts) if rollouts else None,
                "unfinished": unfinished(),
            }

        return packed

    def load_state(self, state: dict[str, Any]) -> list[RolloutGroup]:
        """Restores finished groups and partial rollouts from `state`, a value that the method
        `state()` returned. Returns the groups that must be started again.
        """
        groups = {
            number: RolloutGroup(number, Prompt.from_state(prompt), tuple(seeds))
            for number, prompt, seeds in state["under_way"]
        }
        self._put(groups, state)
        for number in state["ended"]:
            groups.pop(number)
        return list(groups.values())

    def _put(self, groups: Mapping[int, RolloutGroup], state: dict[str, Any]) -> None:
        """Restores the finished groups and the partial rollouts of unfinished groups that `state`
        has. `groups`: the groups in flight, by number.
        """
        rollouts = complete(unpacked_completions(state["rollouts"])) if state["ended"] else ()
        left = iter(rollouts)
        for number in state["ended"]:
            own = [next(left) for _ in groups[number].seeds]
            self.stream.put(groups[number], own)
        self.stream.load_unfinished(state.get("unfinished", {}))

    def _replayed(self, name: str) -> TakenGroups | None:
        if self.journal is None or not self.journal.behind:
            return None
        numbers = self.journal.replay(f"numbers of {name}")["numbers"]
        if self.stream.pauses_between_takes:
            groups = {group.number: group for group in self.under_way}
            self._put(groups, self.journal.replay(LEFT))
        return TakenGroups(self.stream.forget(numbers), self.journal.replay(name))

    def _kept(self, name: str, taken: TakenGroups) -> TakenGroups:
        if self.journal is not None:
            numbers = [group.number for group in taken.groups]
            self.journal.keep(f"numbers of {name}", {"numbers": numbers})
            if self.stream.pauses_between_takes:
                self.journal.keep(LEFT, self._snapshot())
            self.journal.record(name, taken.rollouts)
        return taken
