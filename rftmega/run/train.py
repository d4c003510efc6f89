"""Runs one process of a run, from data to an exported model."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rftmega.config import RunConfig
from rftmega.models.known_fields import ignore
from rftmega.run.built_backend import built_backend

if TYPE_CHECKING:
    from rftmega.core.types import Prompt
    from rftmega.data.tokenizer import Tokenizer

Task = Callable[[RunConfig], int]
"""Trains as one process of a run. Returns its exit code."""


def task_of(config: RunConfig) -> Task:
    """Returns the training function of `algorithm.task`, after registering
    model.ignore_config_fields in this process.
    """
    ignore(config.model.ignore_config_fields)
    return reinforce if config.algorithm.task == "rl" else supervise


def tokenizer_of(config: RunConfig, tools: Sequence[dict[str, Any]] = ()) -> "Tokenizer":
    """Returns the tokenizer of the model's folder with the chat options of `data.*`; `tools`:
    specifications of the tools that the template shows.
    """
    from rftmega.data.tokenizer import Chat, Tokenizer

    trusted, chat = config.model.trust_remote_code, Chat.of(config.data, tools=tools)
    return Tokenizer(
        config.model.path,
        trust_remote_code=trusted,
        chat=chat,
        control_tokens=config.data.control_tokens,
    )


def reinforce(config: RunConfig) -> int:
    """Trains a policy on prompts and rewards. Returns the exit code."""
    from rftmega.data.splits import prompts_of, ptx_of
    from rftmega.environments import create as environments
    from rftmega.rewards import MajorityReward, Reasoning, check_prompts, create
    from rftmega.runtime.parallel.environment import whole_number

    tokenizer = tokenizer_of(config, environments.specs_of(config.environment))
    environment = environments.create(config.environment, tokenizer)

    def check(prompts: "Sequence[Prompt]") -> None:
        check_prompts(config.reward, prompts)
        environments.check(environment, prompts)

    # Data first, so that errors in it show before the heavy imports.
    share = {"rank": whole_number("RANK", 0), "ranks": whole_number("WORLD_SIZE", 1)}
    prompts, held_out = prompts_of(config, tokenizer, check=check, **share)
    ptx = ptx_of(config, tokenizer, **share)
    reasoning = Reasoning.of(config.reward.reasoning_markers, tokenizer)
    reward = create(config.reward, tokenizer.decode, reasoning)

    from rftmega.monitoring.callbacks import callbacks_of
    from rftmega.monitoring.observers.assemble import evaluation_of_prompts
    from rftmega.monitoring.observers.checkpointing import resume
    from rftmega.monitoring.observers.control_tokens import ControlTokensInData
    from rftmega.run.input_files import inputs_of
    from rftmega.run.placement.reinforcement import ReinforcementStrategy
    from rftmega.run.process import joined
    from rftmega.runtime.parallel.process_group import undone
    from rftmega.trainer import Algorithm

    with joined(config) as (world, stop):
        strategy = ReinforcementStrategy(
            config,
            world,
            built_backend(config),
            stop_ids=[*tokenizer.stop_ids, *getattr(environment, "stop_ids", ())],
            environment=environment,
        )
        size, pattern = config.rollout.samples_per_prompt, config.reward.answer_pattern
        trained = MajorityReward(reasoning, size, pattern) if config.reward.majority else reward
        with undone(world, strategy.close):
            trainer = Algorithm(config).reinforced(strategy, trained, ptx=ptx, stop=stop)
            parts: dict[str, Any] = {"data": prompts, "trainer": trainer}
            evaluation = evaluation_of_prompts(
                config, held_out, reward, tokenizer, is_main=world.is_main
            )
            trainer.callbacks = [
                ControlTokensInData(tokenizer.named),
                *callbacks_of(
                    config,
                    strategy,
                    parts,
                    evaluation,
                    tokenizer,
                    is_main=world.is_main,
                    grading=lambda context, ids: reasoning.read(context, ids).graded,
                    extracting=trained.extracted,
                ),
            ]
            if world.is_main and config.checkpoint.every:
                strategy.checkpoints.inputs |= inputs_of(config, prompts, held_out, ptx)
            resume(trainer, strategy.checkpoints, parts, config.checkpoint)
            trainer.fit(prompts, steps=config.trainer.steps)
        strategy.close()
    return config.faults.requeue_code if trainer.stopped else 0


def look(config: RunConfig, most: int) -> str:
    """Reads the first `most` records of each data file as a run does, and checks the reward with
    them. Returns a one-line summary.

    Raises ConfigError for reward functions and patterns that can't be used, DataError for records
    that a run would refuse.
    """
    from rftmega.data.splits import given_of, prompts_of, ptx_of
    from rftmega.rewards import Reasoning, check_prompts, create

    tokenizer = tokenizer_of(config)
    files = [config.data.train, *config.data.sources, *config.data.held_out.values()]
    files += [config.data.ptx]
    said = f"the first {most} records of {', '.join(filter(None, files))}"
    if config.algorithm.task != "rl":
        given_of(config, tokenizer, most)
        return said
    prompts_of(
        config,
        tokenizer,
        check=lambda prompts: check_prompts(config.reward, prompts),
        most=most,
    )
    ptx_of(config, tokenizer, most)
    reasoning = Reasoning.of(config.reward.reasoning_markers, tokenizer)
    create(config.reward, tokenizer.decode, reasoning)
    return f"{said}; reward of {', '.join(sorted(config.reward.used())) or 'others'}"


def supervise(config: RunConfig) -> int:
    """Trains a policy on given completions or preferences, or a reward model on preferences.
    Returns the exit code.
    """
    from rftmega.data.splits import given_of
    from rftmega.runtime.parallel.environment import whole_number

    tokenizer = tokenizer_of(config)
    share = {"rank": whole_number("RANK", 0), "ranks": whole_number("WORLD_SIZE", 1)}
    rows, held_out = given_of(config, tokenizer, **share)

    from rftmega.monitoring.callbacks import callbacks_of
    from rftmega.monitoring.observers.assemble import (
        evaluation_of_preferences,
        evaluation_of_rows,
    )
    from rftmega.monitoring.observers.checkpointing import resume
    from rftmega.monitoring.observers.control_tokens import ControlTokensInData
    from rftmega.run.input_files import inputs_of
    from rftmega.run.placement.reference_log_probs import collate_of
    from rftmega.run.placement.supervised import SupervisedStrategy
    from rftmega.run.process import joined
    from rftmega.trainer import Algorithm
    from rftmega.trainer.loop import Trainer

    with joined(config) as (world, stop):
        strategy = SupervisedStrategy(config, world, built_backend(config))
        if config.algorithm.task == "preference":
            # before a resume, so that the weights are those of the start
            collate = collate_of(config, strategy.policy, rows, held_out, world)
            trainer: Trainer = Algorithm(config).preferring(
                strategy, strategy.policy, collate, stop=stop
            )
            evaluation = evaluation_of_preferences(config, held_out, strategy.policy, collate)
        else:
            trainer = Algorithm(config).supervised(strategy, stop=stop)
            evaluation = evaluation_of_rows(config, held_out, strategy.model)
        parts: dict[str, Any] = {"data": rows, "trainer": trainer}
        trainer.callbacks = [
            ControlTokensInData(tokenizer.named),
            *callbacks_of(config, strategy, parts, evaluation, tokenizer, is_main=world.is_main),
        ]
        if world.is_main and config.checkpoint.every:
            strategy.checkpoints.inputs |= inputs_of(config, rows, held_out)
        resume(trainer, strategy.checkpoints, parts, config.checkpoint)
        trainer.fit(rows, steps=config.trainer.steps)
    return config.faults.requeue_code if trainer.stopped else 0
