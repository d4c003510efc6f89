"""PPOTrainerVL: LightRFT's training loop (rollout, update, weight sync) on top of rftmega.

It delegates to rftmega and contains no formula itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.algorithms.kl import KLController
from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.values import value_loss
from rftmega.config.options.algorithms import Clip
from rftmega.core.types import COUNT, Metrics
from rftmega.core.types import Experience as OwnExperience
from rftmega.lightrft.metric_writers import MetricWriters
from rftmega.lightrft.naive_experience_maker import NaiveExperienceMaker
from rftmega.lightrft.padded_experience import Experience, Samples, per_target, to_experience
from rftmega.trainer.optimizer_steps import Schedule, take_steps

# LightRFT's argument -> its default, and what determines it in rftmega
DECIDED: dict[str, tuple[Any, str]] = {
    "ema_beta": (0.992, "algorithm.ema_beta of the config"),
    "ptx_coef": (0, "algorithm.ptx_coef and data.ptx of rftmega train"),
    "micro_train_batch_size": (8, "trainer.max_tokens_per_micro_batch of the config"),
    "gradient_checkpointing": (False, "parallel.recompute of the config"),
    "max_norm": (1.0, "optimizer.clip_grad of the config"),
}


class PPOTrainerVL:
    """PPOTrainerVL trains a vision-language policy with PPO. Every process calls its methods with
    the whole batch.
    """

    def __init__(
        self,
        strategy: Any,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        ema_model: Any,
        actor_optim: Any,
        critic_optim: Any,
        actor_scheduler: Any,
        critic_scheduler: Any,
        ema_beta: float = 0.992,
        init_kl_coef: float = 0.001,
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        ptx_coef: float = 0,
        micro_train_batch_size: int = 8,
        buffer_limit: int = 0,
        buffer_cpu_offload: bool = True,
        eps_clip: float = 0.2,
        value_clip: float = 0.2,
        micro_rollout_batch_size: int = 8,
        gradient_checkpointing: bool = False,
        max_epochs: int = 1,
        max_norm: float = 1.0,
        tokenizer: Any = None,
        processor: Any = None,
        prompt_max_len: int = 128,
        dataloader_pin_memory: bool = True,
        remote_rm_url: Any = None,
        reward_fn: Any = None,
        reward_fn_label_map: dict[str, Any] | None = None,
        reward_recipe: dict[str, Any] | None = None,
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
        **generate_kwargs: Any,
    ):
        """Takes LightRFT's arguments.

        `strategy`: a LightRFTStrategy. `actor`, `critic`, `reward_model`, `initial_model`,
        `tokenizer`, `processor`, `prompt_max_len`, `remote_rm_url` and the `reward_...` arguments:
        as NaiveExperienceMaker takes them. Models have their own optimizers and schedules, so the
        optimizers and schedulers passed here are ignored. The buffer is always on the host and is
        moved to a device without a data loader, so `buffer_cpu_offload` and `dataloader_pin_memory`
        have no effect. `kl_target` None: a constant KL weight. `args.use_kl_loss` of the strategy
        moves the KL from the rewards into the loss. `buffer_limit`: maximum number of rows in the
        buffer, 0: unlimited. `eps_clip`, `value_clip`: clip ranges of the probability ratio and of
        the values. `save_hf_ckpt`: also save Hugging Face folders; `disable_ds_ckpt`: save no
        training checkpoints. `generate_kwargs`: options for
        `NaiveExperienceMaker.generate_samples`. Raises ValueError for an argument in DECIDED that
        is neither its default nor the config's value, and for an `ema_model`, since the policy
        keeps its own moving average.
        """
        self.strategy, self.actor, self.critic = strategy, actor, critic
        said = {
            "ema_beta": getattr(strategy.config.algorithm, "ema_beta", 0.0),
            "ptx_coef": 0,
            "micro_train_batch_size": strategy.micro_train_batch_size,
            "gradient_checkpointing": strategy.config.parallel.recompute != "none",
            "max_norm": strategy.max_norm,
        }
        given = {
            "ema_beta": ema_beta,
            "ptx_coef": ptx_coef,
            "micro_train_batch_size": micro_train_batch_size,
            "gradient_checkpointing": gradient_checkpointing,
            "max_norm": max_norm,
        }
        for name, value in given.items():
            default, where = DECIDED[name]
            if value not in (default, said[name]):
                raise ValueError(
                    f"{name}={value}, and here it is {said[name]}: {where} decides it."
                )
        if ema_model is not None:
            raise ValueError(
                "ema_model is not read: the policy keeps its average where algorithm.ema_beta is above 0. Give None."
            )
        self.kl_ctl = KLController(init_kl_coef, target=kl_target or 0.0, horizon=kl_horizon)
        self.in_loss = (
            bool(getattr(strategy.args, "use_kl_loss", False)) and initial_model is not None
        )
        self.loss_fn = policy_loss(
            options=Clip(low=eps_clip, high=eps_clip), kl_coef=self.kl_ctl if self.in_loss else 0.0
        )
        self.value_loss_fn = value_loss(clip=value_clip)
        self.max_epochs, self.buffer_limit = max_epochs, buffer_limit
        self.save_hf_ckpt, self.disable_ds_ckpt = save_hf_ckpt, disable_ds_ckpt
        self.generate_kwargs = {
            "micro_rollout_batch_size": micro_rollout_batch_size,
            **generate_kwargs,
        }
        self.experience_maker = NaiveExperienceMaker(
            actor,
            critic,
            reward_model,
            initial_model,
            tokenizer,
            prompt_max_len,
            None if self.in_loss else self.kl_ctl,
            strategy,
            remote_rm_url,
            reward_fn,
            reward_fn_label_map,
            reward_recipe,
            processor,
        )
        self.replay_buffer: list[Experience] = []
        self.writers: MetricWriters | None = None

    def fit(
        self,
        args: Any,
        prompts_dataloader: Iterable[Any],
        pretrain_dataloader: Any = None,
        eval_dataloader: Iterable[Any] | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int = 1,
    ) -> None:
        """Trains for `args.num_episodes` (default 1) passes over the batches. To resume, give as
        `consumed_samples` the number of prompts of all earlier passes and batches: these prompts
        are skipped.

        A batch is a dict of prompts, images and labels, or a tuple (prompts, images, references,
        labels), whose last items may be missing. `num_update_steps_per_episodes`: rollouts per
        episode, from which the position to resume at is computed. `args.eval_steps` (-1: never),
        `save_steps` (-1), `logging_steps` (1), `ckpt_path` and `save_path` are as in LightRFT.
        Raises ValueError for a `pretrain_dataloader`: see `ptx_coef`.
        """
        if pretrain_dataloader is not None:
            raise ValueError(
                f"pretrain_dataloader is not read: {DECIDED['ptx_coef'][1]} decide it."
            )
        episodes = range(getattr(args, "num_episodes", 1))
        size = getattr(args, "rollout_batch_size", None) or self.strategy.args.rollout_batch_size
        step = consumed_samples // size
        done = step // max(num_update_steps_per_episodes, 1)
        skipped = step - done * num_update_steps_per_episodes
        for episode in episodes[done:]:
            for batch in islice(prompts_dataloader, skipped, None):
                step += 1
                self.strategy.update_engine_weights(self.actor)
                logs = self.rollout(batch) | self.ppo_train(step)
                self.replay_buffer.clear()
                every = getattr(args, "eval_steps", -1)
                if eval_dataloader is not None and every > 0 and step % every == 0:
                    self.strategy.update_engine_weights(self.actor)
                    logs |= self.evaluate(eval_dataloader, step)
                states = {"consumed_samples": step * size, "kl_coef": self.kl_ctl.value}
                self.save_logs_and_checkpoints(args, step, None, logs, states, episode)
            skipped = 0
        if self.writers is not None:
            self.writers.close()

    def rollout(self, batch: Any) -> Metrics:
        """Generates completions of a batch of prompts and adds their experiences to the buffer.
        Returns their mean reward and response length.

        The engine must have the policy's current weights.
        """
        prompts, asked = _asked(batch)
        made = self.experience_maker.make_experience_list(prompts, **asked, **self.generate_kwargs)
        self.replay_buffer += made
        while (
            self.buffer_limit and len(self.replay_buffer) > 1 and self._rows() > self.buffer_limit
        ):
            self.replay_buffer.pop(0)
        return {f"rollout_{name}": value for name, value in _means(made).items()}

    def ppo_train(self, global_steps: int = 0) -> Metrics:
        """Trains `max_epochs` times on the buffer, with `train_batch_size` rows per optimizer step.
        Returns the mean metrics of all steps.

        `global_steps`: number of the training step, which together with the strategy's seed
        determines the order of the rows in epochs after the first.
        """
        whole = OwnExperience.join([self._own(each).ragged() for each in self.replay_buffer])
        parts = max(len(whole) // self.strategy.train_batch_size, 1)
        schedule = Schedule(parts, self.max_epochs, seed=self.strategy.seed)
        rows = schedule.mini_batches(whole.rollouts.sizes, global_steps)
        found = take_steps(self.actor, whole, self.loss_fn, rows)
        if self.critic is not None:
            critics = take_steps(self.critic, whole, self.value_loss_fn, rows, name="critic")
            found |= _of_critic(critics)
        if "kl" in found:
            self.kl_ctl.update(found["kl"], len(whole))
            found["kl_coef"] = self.kl_ctl.value
        return _shown(found)

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: Tensor | None = None
    ) -> Metrics:
        """Takes an optimizer step of the actor and, if there is a critic, one of the critic.
        Returns the metrics.

        `entropy_mask`: see `training_step_actor`. `global_steps` is ignored.
        """
        found = self.training_step_actor(experience, entropy_mask)
        return found if self.critic is None else found | self.training_step_critic(experience)

    def training_step_actor(
        self, experience: Experience, entropy_mask: Tensor | None = None
    ) -> Metrics:
        """Takes an optimizer step of the actor. Returns the metrics.

        `entropy_mask` [B, A]: only tokens where it is True count in the loss; None: all response
        tokens.
        """
        own = self._own(experience)
        if entropy_mask is not None:
            own = replace(own, mask=own.mask & per_target(entropy_mask.bool(), own.rows))
        return _shown(self.actor.step(own.ragged(), self.loss_fn))

    def training_step_critic(self, experience: Experience) -> Metrics:
        """Takes an optimizer step of the critic. Returns the metrics."""
        own = self._own(experience).ragged()
        return _shown(_of_critic(self.critic.step(own, self.value_loss_fn)))

    def evaluate(self, eval_dataloader: Iterable[Any], global_step: int) -> Metrics:
        """Generates one greedy completion of each evaluation prompt, without training. Returns the
        mean reward and response length.

        The engine must have the policy's current weights. `global_step` is ignored.
        """
        maker, samples = self.experience_maker, list[Samples]()
        asked_for = {"n_samples_per_prompt": 1, "temperature": 0.0}
        tasks = maker.tasks
        for batch in eval_dataloader:
            prompts, asked = _asked(batch)
            samples += maker.generate_samples(
                prompts, **asked, **(self.generate_kwargs | asked_for)
            )
        found = [maker.make_experience(each) for each in samples]  # moves the models to the device
        maker.tasks = tasks  # training's seeds are the same as without the evaluation
        return {f"eval_{name}": value for name, value in _means(found).items()}

    def save_logs_and_checkpoints(
        self,
        args: Any,
        global_step: int,
        step_bar: Any,
        logs_dict: Mapping[str, float] | None = None,
        client_states: dict[str, Any] | None = None,
        episode: int = 0,
    ) -> None:
        """Prints the metrics `logs_dict` of a step, and writes them to TensorBoard and wandb as
        `args.use_tensorboard` and `args.use_wandb` ask (see MetricWriters), if `global_step` is a
        multiple of `args.logging_steps`. If it is a multiple of `args.save_steps`, saves training
        checkpoints with `client_states` in `args.ckpt_path` and Hugging Face folders in
        `args.save_path`.

        `step_bar` is ignored.
        """
        if global_step % getattr(args, "logging_steps", 1) == 0:
            numbers = [f"{name} {value:.4g}" for name, value in (logs_dict or {}).items()]
            self.strategy.print(f"episode {episode}, step {global_step}:", ", ".join(numbers))
            if self.writers is None or self.writers.args is not args:
                self.writers = MetricWriters(args)
            self.writers.write(logs_dict or {}, global_step)
        every = getattr(args, "save_steps", -1)
        if every <= 0 or global_step % every:
            return
        tag = f"global_step{global_step}"
        if not self.disable_ds_ckpt:
            folder = str(Path(args.ckpt_path) / "_actor")
            self.strategy.save_ckpt(self.actor, folder, tag, client_state=client_states)
            if self.critic is not None:
                self.strategy.save_ckpt(self.critic, str(Path(args.ckpt_path) / "_critic"), tag)
        if self.save_hf_ckpt:
            self.strategy.strategy.export(Path(args.save_path) / tag)

    def _own(self, experience: Experience) -> OwnExperience:
        return to_experience(experience, self.experience_maker.processor)

    def _rows(self) -> int:
        return sum(len(each.sequences) for each in self.replay_buffer)


def _asked(batch: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns (prompts, keyword arguments of `generate_samples`) of a batch of a data loader."""
    if not isinstance(batch, Mapping):
        names = ("prompts", "images", "references", "labels")
        batch = dict(zip(names, batch, strict=False))
    keys = {"all_images": "images", "all_videos": "videos", "labels": "labels"}
    given = {name: batch.get(key) for name, key in keys.items()}
    return batch["prompts"], {name: value for name, value in given.items() if value is not None}


def _means(experiences: Sequence[Experience]) -> Metrics:
    names = ("reward", "response_length")
    parts = {name: [(each.info or {})[name].float() for each in experiences] for name in names}
    return {name: torch.cat(part).mean().item() for name, part in parts.items() if part}


def _of_critic(metrics: Metrics) -> Metrics:
    """Returns the metrics of a value model under the names that LightRFT gives them."""
    found = {
        f"critic_{name}": value for name, value in metrics.items() if not name.startswith(COUNT)
    }
    return found | {"critic_loss": metrics["value_loss"]}


def _shown(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not name.startswith(COUNT)}
