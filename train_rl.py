"""Reinforcement fine-tuning of a language model: parse the config, build a strategy, run a trainer."""

import sys
from functools import partial
from typing import Any

from rftmega.parallel import stop

if __name__ in ("__main__", "__mp_main__"):  # a rank of --processes on CUDA is the second
    stop.listen()  # before anything that takes time

from rftmega.config import RunConfig  # noqa: E402
from rftmega.strategy import command_line  # noqa: E402


def train(config: RunConfig) -> int:
    """One run, from data to an exported model. The exit code."""
    from rftmega.data import Tokenizer

    tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    stopped = (reinforce if config.algorithm.task == "rl" else supervise)(config, tokenizer)
    return config.faults.requeue_code if stopped else 0


def reinforce(config: RunConfig, tokenizer: Any) -> bool:
    """From prompts to a policy that answers them better. Whether it was stopped before the last step."""
    from rftmega.data import prompts_of, ptx_of
    from rftmega.rewards import MajorityReward, check_prompts, create

    # Data first: what is wrong with it shows before the heavy imports.
    prompts, held_out = prompts_of(config, tokenizer, check=partial(check_prompts, config.reward))
    ptx = ptx_of(config, tokenizer)
    reward = create(config.reward, tokenizer.decode)

    from rftmega.strategy.joining import joined
    from rftmega.strategy.megatron import MegatronStrategy
    from rftmega.strategy.watching import watch
    from rftmega.trainer import Algorithm
    from rftmega.trainer.observers import evaluation_of_prompts

    with joined(config) as (world, asked):
        strategy = MegatronStrategy(config, world, stop_ids=tokenizer.stop_ids)
        size, pattern = config.rollout.samples_per_prompt, config.reward.answer_pattern
        learnt = MajorityReward(tokenizer.decode, size, pattern) if config.reward.majority else reward
        trainer = Algorithm(config).reinforced(strategy, learnt, ptx=ptx, stop=asked)
        evaluation = evaluation_of_prompts(config, held_out, reward)
        watch(trainer, strategy, config, prompts, evaluation, tokenizer, is_main=world.is_main)
        trainer.fit(prompts, steps=config.trainer.steps)
        strategy.close()
    return trainer.stopped


def supervise(config: RunConfig, tokenizer: Any) -> bool:
    """From given answers to a policy, or from preferences to a reward model."""
    from rftmega.data import given_of

    rows, held_out = given_of(config, tokenizer)

    from rftmega.strategy.joining import joined
    from rftmega.strategy.supervised import SupervisedStrategy
    from rftmega.strategy.watching import watch
    from rftmega.trainer import Algorithm
    from rftmega.trainer.observers import evaluation_of_rows

    with joined(config) as (world, asked):
        strategy = SupervisedStrategy(config, world)
        trainer = Algorithm(config).supervised(strategy, stop=asked)
        evaluation = evaluation_of_rows(config, held_out, strategy.model)
        watch(trainer, strategy, config, rows, evaluation, tokenizer, is_main=world.is_main)
        trainer.fit(rows, steps=config.trainer.steps)
    return trainer.stopped


def main() -> int:
    return command_line.run(train, __doc__)


if __name__ == "__main__":
    command_line.prepare()
    sys.exit(main())
