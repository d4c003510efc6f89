"""MegatronStrategy: builds and places policy, engine and weight transfer of a run on Megatron-Core."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rftmega import rollout, weights
from rftmega.config import RunConfig
from rftmega.data import Tokenizer
from rftmega.errors import ConfigError
from rftmega.interfaces import Numerics, RolloutEngine, SteppedPolicy, SteppedValueModel, WeightSync
from rftmega.megatron import MegatronActor, MegatronCritic
from rftmega.megatron.offload import ADAM, MAIN_PARAMETERS
from rftmega.parallel.launch import World
from rftmega.parallel.layout import layout_name
from rftmega.parallel.seeds import set_seed
from rftmega.parallel.topology import Topology
from rftmega.rollout.servers import ServerEngine
from rftmega.strategy import retention
from rftmega.strategy.arguments import lightrft_arguments, rows_per_micro_batch, rows_per_update
from rftmega.strategy.base import StrategyBase
from rftmega.strategy.checkpoints import Model, TrainingCheckpoints, of_run
from rftmega.strategy.dispatch import POLICY, AskedByOne, ColocatedPolicy, ColocatedValues, ColocatedWeights, SharedEngine, Turns
from rftmega.strategy.export import export
from rftmega.strategy.memory import predicted
from rftmega.strategy.numerics import EngineNumerics
from rftmega.strategy.requests import Answer
from rftmega.types import Completion, Prompt

log = logging.getLogger(__name__)
Learnt = TypeVar("Learnt", MegatronActor, MegatronCritic)


class MegatronStrategy(StrategyBase):
    """Every process holds its shard of the actor. Colocated, it holds an engine too (or its slice of one), and they take turns;
    separate, vLLM servers beside the processes are the engines.
    """

    def __init__(self, config: RunConfig, world: World, *, stop_ids: Sequence[int]):
        super().__init__(
            seed=config.trainer.seed,
            max_norm=config.optimizer.clip_grad,
            micro_train_batch_size=rows_per_micro_batch(config),
            train_batch_size=rows_per_update(config),
            args=lightrft_arguments(config),
        )
        self.config = config
        if config.strategy == "separate" and world.local_size != world.size:
            raise ConfigError(
                f"strategy=separate shares memory with its servers, so all {world.size} processes must be on one host; this one "
                f"has {world.local_size} of them. Take strategy=colocated."
            )
        set_seed(config.trainer.seed)
        self.topology = Topology.create(config.parallel, seed=config.trainer.seed)
        actor = self._actor = self._built(MegatronActor(config, self.topology))
        manager = actor.manager
        judges = self._build_value_models()
        self._learning: dict[str, Model] = {name: model for name, model in judges.items() if name == "critic"} | {POLICY: actor}
        separate = config.strategy == "separate"
        if world.is_main:
            log.info(
                "policy: %s, %s parameters in %s, %s; engines: %d x %s, %s",
                manager.description.family,
                f"{manager.description.parameters:,}",
                str(manager.config.params_dtype).removeprefix("torch."),
                layout_name(config.parallel, self.topology.data),
                config.rollout.servers if separate else world.size // config.rollout.tensor,
                config.rollout.engine,
                config.strategy,
            )
        models = {POLICY: manager.residency} | {name: model.manager.residency for name, model in judges.items()}
        self._turns = Turns(models, offload=config.trainer.offload, predicted=predicted(config, world))
        self._turns.start()
        self._engine = rollout.create(config, world, vocabulary=manager.description.vocabulary, stop_ids=stop_ids)
        if not separate:
            self._turns.engine = self._engine
            self._engine.sleep()  # it holds all that it may, and the trainer comes back
        self._turns.push()
        self.inference_engine, self.inference_engine_type = self._engine, config.rollout.engine
        self.numerics: Numerics = EngineNumerics(actor, is_main=world.is_main)
        self._versions = count()  # of pushes asked for through `update_engine_weights`
        self._bucket_bytes = config.trainer.push_bucket_mib * 2**20
        self.policy: SteppedPolicy = ColocatedPolicy(actor, self._turns)
        faces = {name: ColocatedValues(model, self._turns, name) for name, model in judges.items()}
        self.critic: SteppedValueModel | None = faces.get("critic")
        self.reward_model: SteppedValueModel | None = faces.get("reward_model")
        sync: WeightSync
        if isinstance(self._engine, ServerEngine):
            sync = weights.SharedWeights(manager.bound, self._engine, bucket_bytes=self._bucket_bytes)
        else:
            sync = weights.EngineWeights(manager.bound, self._engine, bucket_bytes=self._bucket_bytes)
            self._engine.sleep()  # it has no weights yet, and a checkpoint may be loaded next
        self.weights: WeightSync = ColocatedWeights(sync, self._turns)
        face, self.engine_processes = (AskedByOne, world.size) if separate else (SharedEngine, config.rollout.tensor)
        self.engine: RolloutEngine = face(
            self._engine,
            self._turns,
            world,
            self.weights,
            processes_per_engine=self.engine_processes,
            restarts=config.faults.engine_restarts,
            reward_limit=config.reward.timeout,
        )
        actor.push_to_rollout = self.weights.push

    def _build_value_models(self) -> dict[str, MegatronCritic]:
        """Those that the config asks for: the critic, with the layout and the optimizer of its own section, and the reward model,
        with the policy's layout and no optimizer.
        """
        config, found = self.config, {}
        if config.algorithm.advantage == "gae":
            chosen = config.critic
            model = replace(config.model, path=chosen.path or config.model.path)
            own = replace(config, model=model, parallel=chosen.parallel, optimizer=chosen.optimizer)
            found["critic"] = self._built(MegatronCritic(own, Topology.create(chosen.parallel, seed=config.trainer.seed)))
        if config.reward.model:
            own = replace(config, model=replace(config.model, path=config.reward.model_path))
            found["reward_model"] = self._built(MegatronCritic(own, self.topology, role="reward"))
        for name, built in found.items():
            if self.topology.is_main:
                log.info(
                    "%s: %s, %s", name, built.manager.cfg.model.path, layout_name(built.manager.cfg.parallel, built.topology.data)
                )
        return found

    def _built(self, model: Learnt) -> Learnt:
        """Where models take turns on the device, one leaves it as soon as it is built: the next one needs the memory."""
        if self.config.trainer.offload:
            model.manager.residency.only()
        return model

    def export(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder, and beside it `folder`_ema where an average is kept; every process
        calls it.
        """
        self._turns.push()
        export(self._actor, self.config, folder)

    @cached_property
    def checkpoints(self) -> TrainingCheckpoints:
        """Of policy and critic, as checkpoint.* says."""
        return of_run(self.config, self._learning, self.export)

    def close(self) -> None:
        """Ends the engine, which must be gone before the process groups are."""
        self._engine.close()

    # The interface of LightRFT, as far as the strategy above does not say it already.

    @cached_property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]
        """That of the model's folder, read when it is first needed."""
        return Tokenizer(self.config.model.path, trust_remote_code=self.config.model.trust_remote_code)

    def backward(self, loss: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError: a loss that was computed elsewhere can't go backward through Megatron's schedule."""
        raise _the_schedules("backward")

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model", **kwargs: Any) -> None:
        """Raises NotImplementedError, as `backward`: the step belongs to the same call."""
        raise _the_schedules("optimizer_step")

    def create_optimizer(self, model: Any, **kwargs: Any) -> Any:
        """The optimizer that the model was built with. Raises ValueError for settings: they are optimizer.* of the config."""
        if kwargs:
            raise ValueError(f"create_optimizer takes no {', '.join(kwargs)}: optimizer.* of the config decides them.")
        return self.unwrap_model(model).manager.optimizer

    def _scheduler(self, model: Any, optimizer: Any, max_steps: int) -> Any:
        algorithm = self.config.algorithm
        planned = (self.config.trainer.steps - algorithm.freezing_actor_steps) * algorithm.mini_batches
        if max_steps != planned:
            raise ValueError(
                f"max_steps={max_steps}, but the policy's (trainer.steps - freezing_actor_steps) x mini_batches = {planned}. "
                "Change the config."
            )
        return self.unwrap_model(model).manager.scheduler

    def unwrap_model(self, model: Any) -> Any:
        """The MegatronActor (MegatronCritic) of this strategy's policy (critic); a bare Megatron module of a wrapped one."""
        if isinstance(model, ColocatedPolicy):
            return model.actor
        return model.model if isinstance(model, ColocatedValues) else super().unwrap_model(model)

    def maybe_load_optimizer(self, optimizer: Any, device: Any = None) -> Any:
        """Brings Adam's state and the main parameters back. They come to the device that they left, whatever `device` is."""
        self._actor.manager.residency.on(MAIN_PARAMETERS, ADAM)
        return optimizer

    def maybe_offload_optimizer(self, optimizer: Any) -> Any:
        """Moves Adam's state and the main parameters to the host where trainer.offload says so."""
        if self.config.trainer.offload:
            self._actor.manager.residency.off(MAIN_PARAMETERS, ADAM)
        return optimizer

    def _build_engine(self, args: Any, engine_type: str) -> rollout.Engine:
        """The one that this strategy was built with. Raises ValueError for another type: rollout.engine decides it."""
        if engine_type != self.config.rollout.engine:
            raise ValueError(f"engine_type={engine_type!r}, but rollout.engine={self.config.rollout.engine}. Change the config.")
        return self._engine

    def update_engine_weights(self, actor: Any) -> None:
        """Pushes the policy's weights. Raises ValueError for another model's."""
        self._refuse_another(actor)
        self.weights.push(version=next(self._versions))

    def engine_generate_local(
        self, sampling_params: Any, prompt_token_ids: Any = None, multi_modal_inputs: Any = None
    ) -> list[Answer]:
        """As StrategyBase's. Raises NotImplementedError for strategy=separate, whose servers are asked by one process."""
        if self.config.strategy == "separate":
            raise NotImplementedError("strategy=separate has no engine of a process's own: call gather_and_generate.")
        return super().engine_generate_local(sampling_params, prompt_token_ids, multi_modal_inputs)

    def _generate(self, prompts: list[list[int]], seeds: list[int], temperature: float) -> list[Completion]:
        if self.config.strategy == "separate":
            return self.engine.generate([Prompt(tuple(ids)) for ids in prompts], seeds=seeds, temperature=temperature)
        self._turns.rollout()
        return super()._generate(prompts, seeds, temperature)

    def save_ckpt(
        self,
        model: Any,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
    ) -> None:
        """The policy's (or the critic's) weights, optimizer and schedule as a training checkpoint `save_dir`/`tag`, with
        `client_state`, which must be what JSON has; then at most `max_num` of them of at most `max_mem` MB stay. Every process
        calls it; it waits for the disk. Raises CheckpointError where the folder can't be written, TypeError for a `client_state`
        that JSON has not.
        """
        state = json.loads(json.dumps(client_state or {}))  # as it will come back: JSON's keys are strings
        name = tag or f"version{self._engine.version or 0}"
        kept = TrainingCheckpoints(Path(save_dir), self._named(model), self.config, keep=max_num, keep_mb=max_mem)
        kept.save(state, step=0, tag=name, latest=save_latest)

    def load_ckpt(
        self,
        model: Any,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Takes back what `save_ckpt` wrote, under whatever layout; the engine must be given a policy's weights before its next
        answer. `load_module_only`: weights alone, as without both of the flags before it; the optimizer's main parameters follow.
        Without `load_module_strict` weights that the checkpoint lacks stay.

        Raises CheckpointError where there is no such checkpoint, it is another model's, or not as it was written.
        """
        models = self._named(model)
        found = retention.find(Path(load_dir), tag)
        state = TrainingCheckpoints(Path(load_dir), models, self.config).load(
            found,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            random=False,
        )
        if POLICY in models:
            self._engine.distrust()
        return str(found), state

    def _named(self, model: Any) -> dict[str, Model]:
        """A model that is trained here, by its name. Raises ValueError for another one."""
        for name, trained in self._learning.items():
            if self.unwrap_model(model) is trained:
                return {name: trained}
        raise ValueError(f"{type(model).__name__} is not trained by this strategy, which saves its policy and its critic.")

    def _refuse_another(self, model: Any) -> None:
        if self.unwrap_model(model) is not self._actor:
            raise ValueError(f"{type(model).__name__} is not this strategy's policy, whose weights alone it pushes.")


def _the_schedules(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: Megatron's schedule runs forward, backward and step of all stages and micro-batches together. "
        "Call policy.update(experience, loss_fn), which returns the metrics."
    )
