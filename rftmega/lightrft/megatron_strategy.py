"""LightRFTStrategy offers a ReinforcementStrategy under LightRFT's names."""

import json
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from rftmega.checkpoints import retention
from rftmega.checkpoints.run_checkpoints import TrainedModel, TrainingCheckpoints
from rftmega.core.errors import ConfigError
from rftmega.core.interfaces import Policy, RolloutEngine, ValueModel
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.data.media.audio_processor import AudioProcessor, audio_processor_of
from rftmega.data.media.image_processor import ImageProcessor, processor_of
from rftmega.data.prompt_images import Most
from rftmega.data.tokenizer import Tokenizer
from rftmega.lightrft.arguments import lightrft_arguments, rows_per_micro_batch, rows_per_update
from rftmega.lightrft.requests import GenerationOutput, completion_of
from rftmega.lightrft.strategy import StrategyBase
from rftmega.rollout.engines import Engine
from rftmega.run.placement.colocated import ColocatedPolicy, ColocatedValues
from rftmega.run.placement.phases import POLICY
from rftmega.run.placement.reinforcement import ReinforcementStrategy
from rftmega.runtime.device.residency import ADAM, MAIN_PARAMETERS
from rftmega.trainer.experience import complete


class LightRFTStrategy(StrategyBase):
    """LightRFTStrategy delegates each call to the ReinforcementStrategy that it wraps."""

    def __init__(self, strategy: ReinforcementStrategy):
        """Wraps `strategy`. Raises ConfigError for options whose data LightRFT's Experience can't
        hold, such as rollout.router_replay.
        """
        config = strategy.config
        if (replay := config.rollout.router_replay) != "none":
            raise ConfigError(
                f"rollout.router_replay={replay}: LightRFT's experiences hold no experts' routes. Set it to none, or use "
                "train_rl.py."
            )
        super().__init__(
            seed=config.trainer.seed,
            max_norm=config.optimizer.clip_grad,
            micro_train_batch_size=rows_per_micro_batch(config),
            train_batch_size=rows_per_update(config),
            args=lightrft_arguments(config),
        )
        self.strategy = strategy
        self.config = config
        self.engine_processes = strategy.engine_processes
        self.most_images = Most(config.rollout.max_images, config.rollout.max_videos)
        self.data_options = config.data
        self.inference_engine, self.inference_engine_type = (
            strategy.local_engine,
            config.rollout.engine,
        )
        self.policy: Policy = strategy.policy
        self.critic: ValueModel | None = strategy.critic
        self.reward_model: ValueModel | None = strategy.scoring_models.get("reward_model")
        self.engine: RolloutEngine = strategy.engine
        self._versions = count()  # versions of the pushes of `update_engine_weights`
        # names of the models to which `backward` has added gradients since the last step
        self._accumulates: set[str] = set()

    def close(self) -> None:
        """Stops the engine. Must be called before the process groups are destroyed."""
        self.strategy.close()

    @cached_property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]
        """Returns the tokenizer of the model's folder, loaded on first use. It encodes
        control-token names in texts as control tokens, since the caller applies the chat template.
        """
        return Tokenizer(
            self.config.model.path,
            trust_remote_code=self.config.model.trust_remote_code,
            control_tokens="control",
        )

    @cached_property
    def processor(self) -> ImageProcessor | None:  # type: ignore[override]
        """Returns the image processor of the model's folder; None unless the model is a
        vision-language model.
        """
        return processor_of(self.config.model.path)

    @cached_property
    def audio_processor(self) -> AudioProcessor | None:
        """Returns the audio processor of the model's folder; None unless the model is an
        audio-language model.
        """
        return audio_processor_of(self.config.model.path)

    def backward(self, loss: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Adds the gradient of `loss`, a scalar that was computed from the policy's log-probs or the
        critic's values with gradient; `optimizer_step` averages over the processes. `model`: the
        policy or the critic. `optimizer` is ignored.

        Raises NotImplementedError if the model has pipeline stages, whose schedule runs forward and
        backward passes together, and ValueError if `loss` has no gradient.
        """
        name, learner = self._learner(model)
        manager = learner.manager
        if why := manager.why_no_backward:
            raise NotImplementedError(f"backward: {why}")
        if not loss.requires_grad:
            raise ValueError(
                "backward: the loss has no gradient. Compute it from log-probs or values outside torch.no_grad()."
            )
        self.strategy.phases.update(name)
        if name not in self._accumulates:  # what an earlier step has left
            manager.zero_grad()
        self._accumulates.add(name)
        manager.backward(loss)

    def optimizer_step(
        self, optimizer: Any, model: Any, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> None:
        """Takes an optimizer step of `model` on the gradients of all `backward` calls since the last
        one: their sum, averaged over the processes that computed different rows. Clips the
        gradient and advances the learning-rate schedule as `model.step` does. A step with
        non-finite gradients is skipped, and printed under `name`.

        `optimizer` and `scheduler` are the model's own. Raises RuntimeError without a gradient.
        """
        trained, learner = self._learner(model)
        if trained not in self._accumulates:
            raise RuntimeError("optimizer_step: there is no gradient. Call backward first.")
        self._accumulates.remove(trained)
        self.strategy.phases.update(trained)
        manager = learner.manager
        manager.average_gradients()
        taken, _ = manager.take_step()
        manager.zero_grad()
        if taken:
            learner.runner.after_step()
        else:
            self.print(f"{name}: a step was skipped, since its gradients are not finite.")

    def create_optimizer(self, model: Any, **kwargs: Any) -> Any:
        """Returns the optimizer with which the model was built.

        Raises ValueError for any keyword argument, since optimizer.* of the config determines the
        settings.
        """
        if kwargs:
            raise ValueError(
                f"create_optimizer takes no {', '.join(kwargs)}: optimizer.* of the config decides them."
            )
        return self.unwrap_model(model).manager.optimizer

    def _scheduler(self, model: Any, optimizer: Any, max_steps: int) -> Any:
        algorithm = self.config.algorithm
        planned = (
            self.config.trainer.steps - self.config.critic.warmup_steps
        ) * algorithm.steps_per_rollout
        if max_steps != planned:
            raise ValueError(
                f"max_steps={max_steps}, but the policy's (trainer.steps - critic.warmup_steps) x steps_per_rollout = {planned}. "
                "Change the config."
            )
        return self.unwrap_model(model).manager.lr_scheduler

    def unwrap_model(self, model: Any) -> Any:
        """Returns the MegatronActor of this strategy's policy, or the MegatronCritic of its critic.

        For any other model, removes the wrappers and returns the bare module.
        """
        if isinstance(getattr(model, "module", None), ColocatedPolicy | ColocatedValues):
            model = model.module  # of an ActorVL, an ActorAL or a Critic
        if isinstance(model, ColocatedPolicy):
            return model.actor
        return model.model if isinstance(model, ColocatedValues) else super().unwrap_model(model)

    def maybe_load_optimizer(self, optimizer: Any, device: Any = None) -> Any:
        """Moves the policy's Adam states and main parameters back to the device from which they
        were offloaded. Returns `optimizer`.

        `device` is ignored.
        """
        self.strategy.actor.residency.on(MAIN_PARAMETERS, ADAM)
        return optimizer

    def maybe_offload_optimizer(self, optimizer: Any) -> Any:
        """Moves the policy's Adam states and main parameters to the host if trainer.offload is set.
        Returns `optimizer`.
        """
        if self.config.trainer.offload:
            self.strategy.actor.residency.off(MAIN_PARAMETERS, ADAM)
        return optimizer

    def _build_engine(self, args: Any, engine_type: str) -> Engine:
        """Returns the engine of the wrapped strategy.

        Raises ValueError if `engine_type` differs from rollout.engine.
        """
        if engine_type != self.config.rollout.engine:
            raise ValueError(
                f"engine_type={engine_type!r}, but rollout.engine={self.config.rollout.engine}. Change the config."
            )
        return self.strategy.local_engine

    def update_engine_weights(self, actor: Any) -> None:
        """Sends the policy's weights to the engine. Raises ValueError if `actor` is not this
        strategy's policy.
        """
        self._refuse_another(actor)
        self.strategy.weights.push(version=next(self._versions))

    def engine_generate_local(
        self, sampling_params: Any, prompt_token_ids: Any = None, multi_modal_inputs: Any = None
    ) -> list[GenerationOutput]:
        """Returns completions as `StrategyBase.engine_generate_local` does.

        Raises NotImplementedError for strategy=separate, where one process sends the requests of
        all processes to the servers.
        """
        if self.config.strategy == "separate":
            raise NotImplementedError(
                "strategy=separate has no engine of a process's own: call gather_and_generate."
            )
        return super().engine_generate_local(sampling_params, prompt_token_ids, multi_modal_inputs)

    def _generate(
        self, prompts: list[Prompt], seeds: list[int], temperature: float
    ) -> list[Completion]:
        if self.config.strategy == "separate":
            found = self.strategy.engine.generate(
                prompts, seeds=seeds, sampling=Sampling(temperature)
            )
            return [completion_of(rollout) for rollout in complete(found)]
        self.strategy.phases.rollout()
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
        """Saves the weights, optimizer and learning-rate schedule of the policy or the critic
        (`model`), and `client_state`, as the training checkpoint `save_dir`/`tag`.

        Keeps at most `max_num` checkpoints of at most `max_mem` MB in total. `save_latest`: marks
        the checkpoint as the one that `load_ckpt` finds without a tag. Every process calls the
        method; it returns when the checkpoint is on disk. Raises CheckpointError if the folder
        can't be written, TypeError if `client_state` is not JSON-serializable.
        """
        # as it will be loaded: JSON's keys are strings
        state = json.loads(json.dumps(client_state or {}))
        name = tag or f"version{self.strategy.local_engine.version or 0}"
        kept = TrainingCheckpoints(
            Path(save_dir), self._named(model), self.config, keep=max_num, keep_mb=max_mem
        )
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
        """Loads the checkpoint `tag` (None: the latest) that `save_ckpt` wrote to `load_dir` under
        any parallel layout. Returns (the checkpoint's folder, the `client_state` saved with it).

        After loading a policy, its weights must be sent to the engine before the engine generates
        again. `load_module_only` loads only the weights, as if `load_optimizer_states` and
        `load_lr_scheduler_states` were off; the optimizer's main parameters are set to the loaded
        weights. Without `load_module_strict`, weights that the checkpoint lacks stay unchanged.
        Raises CheckpointError if there is no such checkpoint, or if the checkpoint is corrupt or
        another model's.
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
            self.strategy.local_engine.invalidate()
        return str(found), state

    def _named(self, model: Any) -> dict[str, TrainedModel]:
        """Returns {name: trained model} for a model that this strategy trains; the name is the one
        in checkpoints.

        Raises ValueError for any other model.
        """
        for name, trained in self.strategy.trained.items():
            if self.unwrap_model(model) is trained:
                return {name: trained}
        raise ValueError(
            f"{type(model).__name__} is not trained by this strategy, which trains its policy and its critic."
        )

    def _learner(self, model: Any) -> tuple[str, Any]:
        """Returns (name, model of the backend) of the policy or the critic. Raises ValueError for
        another model.
        """
        ((name, trained),) = self._named(model).items()
        return name, trained

    def _refuse_another(self, model: Any) -> None:
        if self.unwrap_model(model) is not self.strategy.actor:
            raise ValueError(
                f"{type(model).__name__} is not this strategy's policy, whose weights alone it pushes."
            )
