"""Checks of the size and number of steps, and of evaluation."""

import re
from dataclasses import fields
from pathlib import Path

from rftmega.config.schema import OptimizerConfig, RunConfig, TrainerConfig


def step_rows(config: RunConfig) -> list[str]:
    """Returns the problems of the number of rows (sequences) per step, of micro-batch limits that
    cannot hold a row, and of learning rate schedules.
    """
    found = []
    task = config.algorithm.task
    answers = (
        (config.rollout.train_samples_per_prompt or config.rollout.samples_per_prompt)
        if task == "rl"
        else 1
    )
    rows = config.trainer.prompts_per_step * answers
    if config.rollout.train_samples_per_prompt > config.rollout.samples_per_prompt:
        found.append(
            f"rollout.train_samples_per_prompt={config.rollout.train_samples_per_prompt} is more than the completions a prompt "
            f"gets (rollout.samples_per_prompt={config.rollout.samples_per_prompt}). Lower it, or set it to 0."
        )
    if 0 < config.algorithm.replay.max_rows < answers:
        found.append(
            f"algorithm.replay.max_rows={config.algorithm.replay.max_rows} can't hold the {answers} completions that are learnt "
            "from of a prompt. Raise it, or set it to 0."
        )
    if config.algorithm.updates_per_epoch > rows:
        found.append(
            f"algorithm.updates_per_epoch={config.algorithm.updates_per_epoch} is more than the rows of a step "
            f"(trainer.prompts_per_step x completions = {config.trainer.prompts_per_step} x {answers} = {rows})."
        )
    longest = config.rollout.max_row_tokens
    together = config.given_rows
    what = "a pair of rows" if together == 2 else "one row"
    # a score takes one more position at the end of the row
    longest += int(task == "reward_model" or bool(config.reward.scoring_models()))
    attention_cap = config.trainer.max_attention_per_micro_batch
    if attention_cap and attention_cap < together * longest**2:
        found.append(
            f"trainer.max_attention_per_micro_batch={attention_cap} can't hold {what} of {longest} tokens, "
            f"{together * longest**2} squared. Raise it, or set it to 0."
        )
    if config.trainer.max_tokens_per_micro_batch < together * longest:
        found.append(
            f"trainer.max_tokens_per_micro_batch={config.trainer.max_tokens_per_micro_batch} can't hold {what} of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}. Raise it, or shorten the rows."
        )
    if (
        not config.trainer.trajectories
        and config.trainer.trajectories_mib != TrainerConfig.trajectories_mib
    ):
        found.append(
            f"trainer.trajectories_mib={config.trainer.trajectories_mib} needs trainer.trajectories above 0: none are written."
        )
    found += _schedule("optimizer", config.optimizer, config, frozen=config.critic.warmup_steps)
    if config.algorithm.advantage.needs_critic and config.critic.optimizer != config.optimizer:
        found += _schedule("critic.optimizer", config.critic.optimizer, config, frozen=0)
    if config.algorithm.ema_beta and not config.trainer.export:
        found.append("algorithm.ema_beta needs trainer.export: the average is only written down.")
    return found


def _schedule(
    section: str, optimizer: OptimizerConfig, config: RunConfig, *, frozen: int
) -> list[str]:
    found = []
    steps = (config.trainer.steps - frozen) * config.algorithm.steps_per_rollout
    if optimizer.warmup_steps >= steps > 0:
        found.append(
            f"{section}.warmup_steps={optimizer.warmup_steps} leaves nothing of the {steps} optimizer steps "
            "(trainer.steps, less critic.warmup_steps for the policy, x algorithm.updates_per_epoch x epochs_per_rollout)."
        )
    if optimizer.min_learning_rate and optimizer.schedule == "constant":
        found.append(
            f"{section}.min_learning_rate={optimizer.min_learning_rate} needs {section}.schedule=linear or cosine: nothing else "
            "reads it."
        )
    elif optimizer.min_learning_rate > optimizer.learning_rate:
        found.append(f"{section}.min_learning_rate is above {section}.learning_rate.")
    return found


def held_out_prompts(config: RunConfig) -> list[str]:
    """Returns the problems of evaluation data: evaluation options without evaluation prompts, and
    invalid names of evaluation sets.
    """
    trainer, found = config.trainer, []
    if not config.data.held_out:
        options = [option.name for option in fields(trainer) if option.name.startswith("eval_")]
        return [
            f"trainer.{option}={value} needs data.eval or data.evals: nothing else reads it."
            for option in options
            if (value := getattr(trainer, option)) != getattr(TrainerConfig(), option)
        ]
    if config.data.eval and config.data.evals:
        found.append(
            "data.eval and data.evals are both given. Give the one file a name in data.evals, too."
        )
    for name in config.data.evals:
        if not re.fullmatch(r"[\w-]+", name):
            found.append(
                f"data.evals: {name!r} becomes a part of metrics' names. Use letters, digits, _ and - only."
            )
    return found


def exports(config: RunConfig) -> list[str]:
    """Returns the problems that would prevent the export or upload of the trained model."""
    trainer, found = config.trainer, []
    if trainer.push_to_hub and not re.fullmatch(r"[\w-]+/[\w.-]+", trainer.push_to_hub):
        found.append(
            f"trainer.push_to_hub={trainer.push_to_hub} is no repository of the hub. Write it as org/name."
        )
    if trainer.push_to_hub and not trainer.export:
        found.append(
            f"trainer.push_to_hub={trainer.push_to_hub} needs trainer.export=true: what is exported is uploaded."
        )
    if trainer.export_quantised and not trainer.export:
        found.append(
            "trainer.export_quantised=true needs trainer.export=true: nothing is written otherwise."
        )
    return found + _replaced(config)


def _replaced(config: RunConfig) -> list[str]:
    """Returns a problem for each model that the run reads from the folder to which it would export
    its own model.
    """
    read = {
        "model.path": config.model.path,
        "model.lora.path": config.model.lora.path,
        "critic.path": config.critic.path,
        "reward.model_path": config.reward.model_path,
        "reward.cost_path": config.reward.cost_path,
    } | {f"model.lora.evaluated.{name}": path for name, path in config.model.lora.evaluated.items()}
    written = [Path(folder).resolve() for folder in config.exports()]
    return [
        f"{option}={path} is where this run writes its own model, so it can't begin with what is there. Choose another "
        "trainer.output, or move the model."
        for option, path in read.items()
        if path and Path(path).resolve() in written
    ]


def evaluation(config: RunConfig) -> list[str]:
    """Returns the problems of evaluation sampling, and of the reward component that measures
    accuracy.
    """
    trainer, found = config.trainer, []
    if not config.data.held_out:
        return []
    if trainer.eval_samples > 1 and not trainer.eval_temperature:
        found.append(
            f"trainer.eval_samples={trainer.eval_samples} at trainer.eval_temperature=0 is the same completion each time. "
            "Raise the temperature, or take one sample."
        )
    truncated = {
        "eval_top_p": trainer.eval_top_p,
        "eval_top_k": trainer.eval_top_k,
        "eval_min_p": trainer.eval_min_p,
    }
    if not trainer.eval_temperature:
        found += [
            f"trainer.{name}={value} at trainer.eval_temperature=0 changes nothing: greedy completions take the likeliest token. "
            "Raise the temperature, or leave it out."
            for name, value in truncated.items()
            if value != getattr(TrainerConfig, name)
        ]
    for k in trainer.eval_pass_at:
        if not 1 <= k <= trainer.eval_samples:
            found.append(
                f"trainer.eval_pass_at={k} must be from 1 to trainer.eval_samples={trainer.eval_samples}: pass@k needs k "
                "completions."
            )
    parts = config.reward.parts()
    if trainer.eval_accuracy not in parts and config.environment.may_reward:
        pass  # the environment may return it
    elif trainer.eval_accuracy not in parts:
        found.append(
            f"trainer.eval_accuracy={trainer.eval_accuracy} is no part of the reward. Choose one of: {', '.join(parts)}."
        )
    elif trainer.eval_accuracy not in config.reward.in_every_completion():
        found.append(
            f"trainer.eval_accuracy={trainer.eval_accuracy} needs a weight of that part, for every kind of prompt: it is not "
            "computed otherwise."
        )
    return found
