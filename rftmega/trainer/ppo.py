"""The training step of all RL algorithms: rollout, scoring, update, weight sync.

GRPO, PPO and related algorithms differ only in the experience maker and the learner that the
trainer gets.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rftmega.algorithms.mismatch import Gap
from rftmega.core.interfaces import (
    Callback,
    Resumable,
    Reward,
    RolloutEngine,
    RolloutGroup,
    RolloutStream,
    WeightSync,
)
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Metrics, Prompt, Rollout, Samples, Sampling
from rftmega.trainer.dynamic_sampler import DynamicSampler
from rftmega.trainer.expected_lengths import ExpectedLengths
from rftmega.trainer.experience import ExperienceMaker, ModelReward
from rftmega.trainer.experience.probes import with_probed_gates
from rftmega.trainer.experience.teachers import log_ratios
from rftmega.trainer.given_completions import GivenCompletions
from rftmega.trainer.group_collector import GroupCollector, Wanted
from rftmega.trainer.journal import Journal
from rftmega.trainer.learner import Learner
from rftmega.trainer.logprob_mismatch.gate import GapGate, chosen_by, gap_of
from rftmega.trainer.loop import Trainer
from rftmega.trainer.prompt_queue import PromptQueue
from rftmega.trainer.replay_mixer import ReplayMixer
from rftmega.trainer.rollout_schedules import Synchronous, groups_of


@dataclass(frozen=True)
class StepSampling:
    """Sampling options of a step's completions; the same seed and weights give the same
    completions.
    """

    samples_per_prompt: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class StepParts:
    """Optional components of a training step.

    refill: selects the scored completions to train on. replay: adds completions of earlier steps.
    given: adds completions of a data set, for teachers.
    model_rewards: add the scores of reward and cost models. gate: stops the run if the log-probs of engine
    and trainer differ too much; None accepts any mismatch. late_scoring: take the log-probs before
    the update from the update's own forward pass instead of a separate pass; valid for one
    optimizer step per rollout without dropout, replay, or a KL in the reward. journal: the record
    of the step's results that the trainer's engine, maker and learner share, used to resume within
    a step. schedule: decides when completions are generated.
    """

    refill: DynamicSampler = field(default_factory=lambda: DynamicSampler(0))
    replay: ReplayMixer | None = None
    given: GivenCompletions | None = None
    model_rewards: Sequence[ModelReward] = ()
    gate: GapGate | None = None
    late_scoring: bool = False
    journal: Journal | None = None
    schedule: Synchronous = field(default_factory=Synchronous)


@dataclass
class ScoredStep:
    """Experience of a step, and its log-prob mismatch, which is None until the log-probs of both
    engine and trainer are known.
    """

    experience: Experience[Ragged]
    gap: Gap | None

    @property
    def measured(self) -> Gap:
        assert self.gap is not None, "the update did not score the experience"
        return self.gap


class PPOTrainer(Trainer):
    """PPOTrainer trains one policy with completions of one engine.

    `step`, the number of finished steps, is also the version of the engine's weights.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        weights: WeightSync,
        reward: Reward,
        maker: ExperienceMaker,
        learner: Learner,
        sampling: StepSampling,
        parts: StepParts = StepParts(),  # noqa: B008  immutable
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
    ):
        """`maker` computes the experience of scored completions, `learner` updates the models on
        it. `parts`: optional components. `callbacks` and `stop`: see Trainer.
        """
        super().__init__(callbacks=callbacks, stop=stop, journal=parts.journal)
        self.engine, self.weights, self.reward, self.model_rewards = (
            engine,
            weights,
            reward,
            parts.model_rewards,
        )
        self.maker, self.learner, self.host = maker, learner, maker.host
        self.refill, self.replay, self.gate = parts.refill, parts.replay, parts.gate
        self.given = parts.given
        self.late_scoring, self.schedule = parts.late_scoring, parts.schedule
        self.samples_per_prompt, self.temperature, self.seed = (
            sampling.samples_per_prompt,
            sampling.temperature,
            sampling.seed,
        )
        self.supply = PromptQueue()
        self.lengths = ExpectedLengths()
        self._lost = 0  # rollouts of this step that were dropped

    def prepare(self, batches: Iterable[list[Prompt]]) -> PromptQueue:
        self.weights.push(version=self.step)
        self.supply.source(batches)
        return self.supply

    def state(self) -> dict[str, Any]:
        parts = {name: part.state() for name, part in self._parts().items()}
        return super().state() | parts | {"schedule": self.schedule.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if "engine" in state:  # of a checkpoint before format 4
            state = state | {"lengths": state["engine"]}
        for name, part in self._parts().items():
            # it may begin with the resumed run
            if name not in ("replay", "given") or name in state:
                part.load_state(state[name])
        if known := state.get("schedule"):
            self.schedule.load_state(self, known)

    def _parts(self) -> dict[str, Resumable]:
        parts: dict[str, Resumable] = {
            "maker": self.maker,
            "learner": self.learner,
            "supply": self.supply,
            "lengths": self.lengths,
        }
        optional = {"replay": self.replay, "given": self.given}
        return parts | {name: part for name, part in optional.items() if part is not None}

    def train_step(self, batch: Sequence[Prompt]) -> Metrics:
        """Takes one training step on the prompts of `batch`: rollout, scoring, update, weight sync.
        Returns the step's metrics.

        Dynamic sampling takes prompts for replacement groups from `supply` and returns unused
        prompts to it.
        """
        samples, seen = self._roll_out(batch)
        for callback in self.callbacks:
            callback.on_rollouts(self, samples)
        scored = self._score(samples)
        trained, added = self._with_others(scored.experience)
        with self.phase("update"):
            complete = partial(self._complete, samples, scored)
            metrics = self.learner.update(scored.experience, self.step, trained, scored=complete)
        if self.replay is not None:
            self.replay.keep(scored.experience, samples.group)
        self.step += 1
        self._join()
        with self.phase("push"):
            metrics |= added | self.weights.push(version=self.step)
        for callback in self.callbacks:
            callback.on_experience(self, samples, scored.experience)
        metrics |= self.maker.measured | log_ratios(scored.experience)
        return metrics | scored.measured.metrics | seen

    def _roll_out(self, batch: Sequence[Prompt]) -> tuple[Samples[Ragged], Metrics]:
        """Returns the scored rows of a step's rollouts, and metrics of the rollout phase."""
        self._lost = 0
        with self.phase("rollout"):
            samples, seen = self.schedule.samples(self, batch)
            for teacher in self.maker.teachers:
                if teacher.chosen.probes:
                    samples, probed = with_probed_gates(
                        samples, teacher, self._probe, seed=self.seed
                    )
                    seen |= probed
        if self._lost:
            seen["rollouts_lost"] = float(self._lost)
        return samples, seen

    def _score(self, samples: Samples[Ragged]) -> "ScoredStep":
        """Returns the experience of the samples, and its log-prob mismatch unless the log-probs
        before the update are unknown yet: in late scoring the update's own forward pass computes
        them.
        """
        # Where no token is the present policy's, the gate asks for new completions, which an update
        # in progress can't provide.
        present = self.host.once(lambda: bool(chosen_by(samples, self.step).flat.any()))
        late = self.late_scoring and present and self.step >= self.learner.frozen_steps
        with self.phase("score"):
            experience = self.maker.make(samples, old_log_probs=not late)
        return ScoredStep(experience, None if late else self._gap(samples, experience))

    def _with_others(self, experience: Experience[Ragged]) -> tuple[Experience[Ragged], Metrics]:
        """Returns the rows that the policy trains on: those of the step, replayed ones and those of
        a data set; and metrics of the latter two.
        """
        trained, metrics = experience, Metrics()
        for name, mixer in (("replay", self.replay), ("given", self.given)):
            if mixer is not None:
                with self.phase(name):
                    trained, own = mixer.beside(trained, self.step)
                metrics |= own
        return trained, metrics

    def _complete(
        self, samples: Samples[Ragged], scored: "ScoredStep", whole: Experience[Ragged]
    ) -> None:
        """Completes `scored` with the log-probs that the update's own forward pass computed.
        `whole`: the experience of `samples` with these log-probs.
        """
        scored.experience, scored.gap = whole, self._gap(samples, whole)

    def _join(self) -> None:
        """Waits for rollouts that run during the update, if the schedule requires it before weights
        change.
        """
        if self.schedule.joins:
            with self.phase("join"):
                self.schedule.join()

    def _gap(self, samples: Samples[Ragged], experience: Experience[Ragged]) -> Gap:
        """Returns the log-prob mismatch of engine and trainer.

        Raises GapExceeded before the update if a gate is set and finds the mismatch too large.
        """
        logp = experience.old_logp
        assert logp is not None
        if self.gate is None:
            return self.host.once(lambda: gap_of(samples, logp, samples.rows.mask))
        return self.gate.check(samples, logp, self.step)

    def rollout(self, prompts: Sequence[Prompt], wanted: Wanted | None = None) -> Samples[Ragged]:
        """Returns `samples_per_prompt` scored completions per prompt; the same prompts, seed and
        weights give the same completions. With `wanted`, generation ends once enough groups are
        good, and only complete groups are returned.
        """
        groups = self.groups(prompts)
        requests = [group.prompt for group in groups for _ in group.seeds]
        seeds = [seed for group in groups for seed in group.seeds]
        collector = self._collector(requests)
        rollouts = self.engine.generate(
            requests,
            seeds=seeds,
            sampling=Sampling(self.temperature),
            reward=self._at_once,
            enough=None if wanted is None else collector.until(wanted),
            expected_lengths=self.lengths.expected(requests),
        )
        return self.collected(requests, rollouts)

    def _probe(
        self, requests: Sequence[Prompt], seeds: Sequence[int], times: int
    ) -> Samples[Ragged]:
        """Returns scored completions of `requests`, in which each prompt occurs `times` in
        succession; `group` numbers the prompts.
        """
        rollouts = self.engine.generate(
            requests, seeds=seeds, sampling=Sampling(self.temperature), reward=self._at_once
        )
        return GroupCollector(requests, self.reward, times).collected(rollouts)

    def groups(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Returns one group per prompt, with the seeds of its completions."""
        return groups_of(prompts, seed=self.seed, samples_per_prompt=self.samples_per_prompt)

    def begin(self, stream: RolloutStream, groups: Sequence[RolloutGroup]) -> None:
        """Starts the rollouts of `groups` on `stream`; completions are scored as they arrive."""
        stream.begin(groups, sampling=Sampling(self.temperature), reward=self._at_once)

    def collected(
        self, requests: Sequence[Prompt], rollouts: Sequence[Rollout | None]
    ) -> Samples[Ragged]:
        """Returns the scored rows of all complete groups in `rollouts`; `requests`: the prompt of
        each rollout.
        """
        self.lengths.learn(requests, rollouts)
        versions = {own for rollout in rollouts if rollout for own in rollout.versions}
        oldest = self.schedule.oldest(self.step)
        assert versions <= set(range(oldest, self.step + 1)), (
            f"completions of policies {sorted(versions)} at step {self.step}: a push was missed"
        )
        self._lost += sum(rollout is not None and bool(rollout.lost) for rollout in rollouts)
        collected = self._collector(requests).collected(rollouts)
        for model_reward in self.model_rewards:
            collected = model_reward(collected)
        return collected

    def _collector(self, requests: Sequence[Prompt]) -> GroupCollector:
        return GroupCollector(requests, self.reward, self.samples_per_prompt)

    @property
    def _at_once(self) -> Reward | None:
        """Returns the reward to apply to each completion as it arrives; None if the reward compares
        the completions of a group.
        """
        return None if getattr(self.reward, "whole_groups", False) else self.reward
