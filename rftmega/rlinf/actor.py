"""ReinforcedActor: the calls of RLinf's actors that drive a training step, for either backend."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError
from rftmega.core.interfaces import Reward
from rftmega.core.ragged import Ragged
from rftmega.core.types import COUNT, Experience, Metrics, Samples
from rftmega.environments import create as environments
from rftmega.rewards import MajorityReward, Reasoning, create
from rftmega.rlinf import channel
from rftmega.rlinf.channel import Channel, SentRollout
from rftmega.run.placement.backend import TrainablePolicy, TrainableValues
from rftmega.run.placement.reinforcement import ReinforcementStrategy
from rftmega.run.train import built_backend, tokenizer_of
from rftmega.runtime.parallel import process_group
from rftmega.trainer import Algorithm
from rftmega.trainer.experience import collect, model_rewards


class ReinforcedActor(ABC):
    """ReinforcedActor trains a policy on rollouts that it receives from a channel.

    All processes make the same calls in the same order. A step is: `set_global_step`,
    `sync_model_to_rollout`, rollouts of `strategy.engine` or another producer,
    `recv_rollout_trajectories`, `compute_advantages_and_returns`, `run_training`. It takes the same
    optimizer steps as `rftmega train` with the same config and rollouts.
    """

    cfg: RunConfig
    strategy: ReinforcementStrategy

    def prepare(self, cfg: RunConfig) -> None:
        """Stores the config. Raises ConfigError for options that need the training loop of
        `rftmega train`, which these calls replace.
        """
        refused = {
            "trainer.max_staleness": cfg.trainer.max_staleness,
            "algorithm.dynamic_sampling.max_rounds": cfg.algorithm.dynamic_sampling.max_rounds,
            "algorithm.replay.max_age": cfg.algorithm.replay.max_age,
            "data.ptx": cfg.data.ptx,
        }
        if found := [f"{name}={value}" for name, value in refused.items() if value]:
            raise ConfigError.listing(
                "An actor of rftmega.rlinf trains on the rollouts that it is sent, and on nothing else. Leave out, or use "
                "`rftmega train`",
                found,
            )
        self.cfg = cfg
        self.global_step = 0
        self._joined = ExitStack()
        self._received: list[SentRollout] = []
        self._experience: Experience[Ragged] | None = None

    @abstractmethod
    def build_policy(self) -> TrainablePolicy:
        """Builds the policy, whose model this object manages."""

    def init_worker(self) -> None:
        """Joins the processes that the launcher started, unless this is already done, and builds
        policy, value models and engine. With trainer.offload, parameters and optimizer state are
        then on the host.
        """
        if not dist.is_initialized():
            self._joined.enter_context(process_group.start())
        cfg = self.cfg
        tokenizer = tokenizer_of(cfg, environments.specs_of(cfg.environment))
        environment = environments.create(cfg.environment, tokenizer)
        reasoning = Reasoning.of(cfg.reward.reasoning_markers, tokenizer)
        self.reward: Reward = create(cfg.reward, tokenizer.decode, reasoning)
        if cfg.reward.majority:
            self.reward = MajorityReward(
                reasoning, cfg.rollout.samples_per_prompt, cfg.reward.answer_pattern
            )
        self.strategy = ReinforcementStrategy(
            cfg,
            process_group.current(),
            _PolicyOf(self),
            stop_ids=[*tokenizer.stop_ids, *getattr(environment, "stop_ids", ())],
            environment=environment,
        )
        strategy, algorithm = self.strategy, Algorithm(cfg)
        self.maker = algorithm.maker(
            strategy.policy, strategy.critic, strategy.host, algorithm.asked(strategy)
        )
        self.learner = algorithm.learner(strategy.policy, strategy.critic, host=strategy.host)
        self.refill = algorithm.refill(strategy.host)
        self.gate = algorithm.gate(strategy)

    def close(self) -> None:
        """Shuts the engine down and leaves the processes that `init_worker` joined."""
        self.strategy.close()
        self._joined.close()

    def set_global_step(self, global_step: int) -> None:
        """Sets the number of finished training steps, which is also the version of the weights that
        the next `sync_model_to_rollout` sends.
        """
        self.global_step = global_step

    def sync_model_to_rollout(self) -> Metrics:
        """Sends the policy's weights to the rollout engines. Returns the metrics of the transfer."""
        return self.strategy.weights.push(version=self.global_step)

    async def recv_rollout_trajectories(self, input_channel: Channel) -> None:
        """Receives the rollouts of a step: this process takes its portion of the
        trainer.prompts_per_step x rollout.samples_per_prompt rollouts from `input_channel`, whose
        producers may put them in any order.

        Raises ValueError if the rollouts of all processes together are not whole groups of the
        current weights.
        """
        size = self.cfg.rollout.samples_per_prompt
        total = self.cfg.trainer.prompts_per_step * size
        own = channel.portion(total, dist.get_rank(), dist.get_world_size())
        received = await channel.receive(input_channel, own)
        channel.check(received, size=size, step=self.global_step)
        self._received = received

    def compute_advantages_and_returns(self) -> dict[str, Tensor]:
        """Scores the received rollouts and computes their log-probs and advantages.

        Returns tensors [B, T] of all B sequences, where column t belongs to token t + 1:
        "advantages", "loss_mask" and "prev_logprobs" (under the current weights); with a critic
        also "values" and "returns", with a KL "ref_logprobs". "rewards" is [B]. Raises GapExceeded
        if the engine's log-probs differ too much from the trainer's.
        """
        samples = self._samples()
        experience = self.maker.make(samples)
        assert experience.old_logp is not None
        if self.gate is not None:
            self.gate.check(samples, experience.old_logp, self.global_step)
        self._experience = experience
        columns = {
            "advantages": experience.advantage,
            "loss_mask": experience.mask,
            "prev_logprobs": experience.old_logp,
            "ref_logprobs": experience.reference_logp,
            "values": experience.old_value,
            "returns": experience.returns,
        }
        found = {name: column.padded() for name, column in columns.items() if column is not None}
        return found | {"rewards": samples.reward}

    def _samples(self) -> Samples[Ragged]:
        if not self._received:
            raise RuntimeError("No rollouts were received: await recv_rollout_trajectories first.")
        samples = collect(
            [sent.prompt for sent in self._received],
            [sent.rollout for sent in self._received],
            self.reward,
            samples_per_prompt=self.cfg.rollout.samples_per_prompt,
        )
        models = self.strategy.scoring_models
        for scored in model_rewards(self.cfg.reward, models, self.strategy.host):
            samples = scored(samples)
        return self.refill.trained(samples)

    def run_training(self) -> Metrics:
        """Takes the optimizer steps of this training step, of the policy and of a critic. Returns
        their metrics, and forgets the rollouts.
        """
        experience = self._experience
        if experience is None:
            raise RuntimeError("There is no experience: call compute_advantages_and_returns first.")
        metrics = self.learner.update(experience, self.global_step, experience)
        self._received, self._experience = [], None
        return {name: value for name, value in metrics.items() if not name.startswith(COUNT)}


class _PolicyOf:
    """The run's backend, whose policy is the one that an actor manages."""

    def __init__(self, actor: ReinforcedActor):
        self.actor, self.backend = actor, built_backend(actor.cfg)

    def policy(self, config: RunConfig) -> TrainablePolicy:
        return self.actor.build_policy()

    def teacher(self, config: RunConfig) -> TrainablePolicy:
        return self.backend.teacher(config)

    def value_model(self, config: RunConfig, *, role: Any) -> TrainableValues:
        return self.backend.value_model(config, role=role)
