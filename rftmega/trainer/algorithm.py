"""Algorithm builds trainers from the config, with experience maker, learner, losses, schedules and
mismatch gate.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rftmega.algorithms.aggregation import Aggregation, aggregation_of
from rftmega.algorithms.kl import KLController
from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.mismatch import effectiveness_of
from rftmega.algorithms.preference import preference_loss
from rftmega.algorithms.shaping import Shaping
from rftmega.algorithms.supervised import cost_loss, cross_entropy_loss, pairwise_loss
from rftmega.algorithms.values import value_loss
from rftmega.config import RunConfig, without_secrets
from rftmega.config.capabilities import engine_of
from rftmega.config.options.teachers import names_of
from rftmega.core.interfaces import (
    Host,
    Machinery,
    Policy,
    Reward,
    Scorer,
    TeacherScorer,
    ValueModel,
    ValueScorer,
)
from rftmega.core.types import LossFn
from rftmega.trainer.dynamic_sampler import DynamicSampler
from rftmega.trainer.experience import ExperienceMaker, ReplayBuffer, model_rewards
from rftmega.trainer.experience.teachers import AskedTeacher
from rftmega.trainer.given_completions import GivenCompletions
from rftmega.trainer.journal import Journal, Journaled
from rftmega.trainer.learner import Learner
from rftmega.trainer.logprob_mismatch.gate import GapGate, limits_of
from rftmega.trainer.optimizer_steps import Schedule
from rftmega.trainer.ppo import PPOTrainer, StepParts, StepSampling
from rftmega.trainer.preference import Collate, PreferenceTrainer
from rftmega.trainer.ptx import PTX, Order
from rftmega.trainer.replay_mixer import ReplayMixer
from rftmega.trainer.rollout_schedules import Asynchronous, OneAhead, Replayed, Synchronous
from rftmega.trainer.supervised import Learns, SupervisedTrainer
from rftmega.trainer.trained_order import read_order


class HasTeachers(Protocol):
    """A part of `Machinery`."""

    @property
    def teachers(self) -> Sequence[TeacherScorer]: ...


class Algorithm:
    """Builds trainers and their components from the config; all components share one KL coefficient
    (`kl`).
    """

    def __init__(self, config: RunConfig):
        self.config = config
        chosen = self.chosen = config.algorithm
        self.longest = config.rollout.max_response_tokens
        self.kl = KLController(chosen.kl.coef, target=chosen.kl.target, horizon=chosen.kl.horizon)

    def reinforced(
        self,
        built: Machinery,
        reward: Reward,
        *,
        ptx: Order | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> PPOTrainer:
        """Builds the trainer that trains with `reward` and, in the same optimizer steps, on the
        supervised sequences of `ptx`, with cross entropy or with teachers. `built`: the run's engine, weight sync and models.

        `stop`: see Trainer; a run with checkpoints can also be stopped within a step.
        """
        config = self.config
        journal = Journal(stop) if config.checkpoint.every else None
        machinery: Machinery | Journaled = built if journal is None else Journaled(built, journal)
        asked = self.asked(machinery)
        mixed = config.algorithm.on_policy_share < 1
        beside = self.ptx(ptx) if ptx and not mixed else None
        given = None
        if ptx and mixed:
            given = GivenCompletions(machinery.policy, ptx, list(asked), built.host)
        return PPOTrainer(
            engine=machinery.engine,
            weights=machinery.weights,
            reward=reward,
            maker=self.maker(machinery.policy, machinery.critic, built.host, asked),
            learner=self.learner(built.policy, built.critic, beside, journal, built.host),
            sampling=StepSampling(
                config.rollout.samples_per_prompt,
                config.rollout.temperature,
                seed=config.trainer.seed,
            ),
            parts=StepParts(
                refill=self.refill(built.host),
                replay=self.replay(machinery.policy, built.host, asked),
                given=given,
                model_rewards=model_rewards(config.reward, machinery.scoring_models, built.host),
                gate=self.gate(built),
                late_scoring=config.late_scoring,
                journal=journal,
                schedule=self.rollout_schedule(built.engine, journal),
            ),
            stop=stop,
        )

    def supervised(
        self, model: Learns, *, stop: Callable[[], bool] = lambda: False
    ) -> SupervisedTrainer:
        """Builds a trainer for supervised fine-tuning (algorithm.task=sft) or for a reward model
        (algorithm.task=reward_model). `stop`: see Trainer.
        """
        if self.chosen.task == "sft":
            return SupervisedTrainer(
                model=model,
                loss_fn=cross_entropy_loss(self.aggregation),
                schedule=self.schedule,
                stop=stop,
            )
        loss_fn = cost_loss() if self.chosen.reward_model_loss == "cost" else pairwise_loss()
        return SupervisedTrainer(
            model=model, loss_fn=loss_fn, group_size=2, schedule=self.schedule, stop=stop
        )

    def preferring(
        self,
        model: Learns,
        policy: Scorer,
        collate: Collate,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> PreferenceTrainer:
        """Builds a trainer of a policy on preference data (algorithm.task=preference). `policy`:
        computes the log-probs of `model`; `collate`: makes rows of examples; `stop`: see Trainer.
        """
        return PreferenceTrainer(
            model=model,
            policy=policy,
            collate=collate,
            loss_fn=self.preference_loss(),
            group_size=self.config.given_rows,
            schedule=self.schedule,
            stop=stop,
        )

    def preference_loss(self) -> LossFn:
        return preference_loss(self.chosen.preference, paired=self.config.reads_pairs)

    @property
    def schedule(self) -> Schedule:
        """Returns the schedule that splits each rollout batch into epochs and mini-batches."""
        return Schedule(
            self.chosen.updates_per_epoch,
            self.chosen.epochs_per_rollout,
            seed=self.config.trainer.seed,
        )

    def maker(
        self,
        policy: Scorer,
        critic: ValueScorer | None = None,
        host: Host | None = None,
        teachers: Sequence[AskedTeacher] = (),
    ) -> ExperienceMaker:
        found = ExperienceMaker(
            policy,
            self.chosen,
            critic=critic,
            kl_weight=self.kl,
            shape=self.shaping(),
            host=host,
        )
        found.teachers = teachers
        return found

    def asked(self, built: HasTeachers) -> list[AskedTeacher]:
        """Returns the teachers of `built`, those of algorithm.teachers, with their options."""
        if not (chosen := self.chosen.teachers):
            return []
        numbers = range(len(chosen))
        return list(map(AskedTeacher, numbers, names_of(chosen), chosen, built.teachers))

    def shaping(self) -> Shaping:
        """Returns the reward shaping that is applied before advantages are computed."""
        chosen = self.config.reward.shaping
        buffer = (
            max(int(chosen.overlong_buffer_share * self.longest), 1)
            if chosen.overlong_buffer_share
            else 0
        )
        return Shaping(
            longest=self.longest,
            buffer=buffer,
            factor=chosen.overlong_penalty_factor,
            normalise=chosen.normalise,
            clip=chosen.clip,
            weight_in=self.config.reward.weight_in,
        )

    def learner(
        self,
        policy: Policy,
        critic: ValueModel | None = None,
        ptx: PTX | None = None,
        journal: Journal | None = None,
        host: Host | None = None,
    ) -> Learner:
        return Learner(
            policy,
            self.policy_loss(),
            effective=effectiveness_of(self.chosen.importance_sampling),
            critic=critic,
            value_loss_fn=self.value_loss(),
            frozen_steps=self.config.critic.warmup_steps,
            kl=self.kl,
            ptx=ptx,
            schedule=self.schedule,
            journal=journal,
            host=host,
        )

    def gate(self, built: Machinery) -> GapGate | None:
        """Returns the gate that stops a run on a log-prob mismatch between engine and trainer.
        `built`: the run's engine, weight sync and models.

        Returns None for the scripted engine, which has no model.
        """
        config = self.config
        if not engine_of(config.rollout).has_model:
            return None
        quantisation = config.rollout.quantization
        limits = limits_of(
            built.numerics.dtype if quantisation == "none" else quantisation,
            percentile=config.rollout.max_logprob_gap,
            mean=config.rollout.mean_logprob_gap,
        )
        folder = Path(config.trainer.output) / "gap"
        described = without_secrets(config)
        return GapGate(
            built,
            limits,
            folder,
            temperature=config.rollout.temperature,
            seed=config.trainer.seed,
            config=described,
            pushes=config.strategy == "colocated" or not config.trainer.max_staleness,
            keeps_caches=config.rollout.on_update == "keep",
        )

    def refill(self, host: Host | None = None) -> DynamicSampler:
        """Returns the dynamic sampler, which selects the groups of completions to train on."""
        chosen = self.chosen.dynamic_sampling
        return DynamicSampler(
            chosen.max_rounds,
            part=chosen.metric,
            oversample=chosen.oversample,
            train_samples=self.config.rollout.train_samples_per_prompt,
            host=host,
        )

    def rollout_schedule(self, engine: Any, journal: Journal | None) -> Synchronous:
        """Returns the schedule that decides when completions are generated; in an asynchronous run
        `engine` must be a RolloutStream as well. `journal`: the record of a step's results, used to
        resume within a step; None: the run can only resume between steps.
        """
        most = self.config.trainer.max_staleness
        if not most:
            return Synchronous()
        if self.config.rollout.ahead:
            return OneAhead(engine, journal)
        if order := self.config.rollout.order:
            return Replayed(engine, journal, max_staleness=most, order=read_order(order))
        return Asynchronous(engine, journal, max_staleness=most)

    def replay(
        self,
        policy: Scorer,
        host: Host | None = None,
        teachers: Sequence[AskedTeacher] = (),
    ) -> ReplayMixer | None:
        """Returns the mixer that trains again on completions of earlier steps, or None if replay is
        off. `policy` computes the new old log-probs of these completions, `teachers` teach them
        again; `host` stores them, one copy per host.
        """
        chosen = self.chosen.replay
        if not chosen.max_age:
            return None
        buffer = ReplayBuffer(chosen.max_rows, host=host)
        own_routes = self.config.rollout.router_replay == "trainer"
        return ReplayMixer(
            policy, buffer, max_age=chosen.max_age, own_routes=own_routes, teachers=teachers
        )

    @property
    def aggregation(self) -> Aggregation:
        return aggregation_of(self.chosen.loss_aggregation, longest=self.longest)

    def policy_loss(self) -> LossFn:
        chosen = self.chosen
        return policy_loss(
            options=chosen.policy_loss,
            correction=chosen.importance_sampling,
            high_entropy_share=chosen.high_entropy_share,
            kl_coef=self.kl if chosen.kl.placement == "loss" else 0.0,
            kl_estimator=chosen.kl.estimator,
            entropy_coef=chosen.entropy_coef,
            teachers={
                name: teacher.weight
                for name, teacher in zip(names_of(chosen.teachers), chosen.teachers, strict=True)
                if teacher.signal == "loss"
            },
            sampled_teachers=[
                name
                for name, teacher in zip(names_of(chosen.teachers), chosen.teachers, strict=True)
                if teacher.vocabulary == "sampled"
            ],
            aggregation=self.aggregation,
        )

    def ptx(self, order: Order) -> PTX:
        """Returns the PTX loss on batches of `order`, trained in addition to the rewarded
        completions.
        """
        return PTX(order, cross_entropy_loss(self.aggregation), self.chosen.ptx_coef)

    def value_loss(self) -> LossFn:
        critic = self.config.critic
        return value_loss(
            clip=critic.value_clip, huber=critic.value_huber, aggregation=self.aggregation
        )
