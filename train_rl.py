"""Reinforcement fine-tuning of a language model: parse the config, build a strategy, run a trainer."""

import sys
from functools import partial

from rftmega.config import RunConfig
from rftmega.strategy import command_line


def train(config: RunConfig) -> int:
    """One run, from data to an exported model. The exit code."""
    return reinforce(config) if config.algorithm.task == "rl" else supervise(config)


def reinforce(config: RunConfig) -> int:
    """From prompts to a policy that answers them better."""
    from rftmega.data import Tokenizer, prompts_of, ptx_of
    from rftmega.rewards import MajorityReward, check_prompts, create

    # Data first: what is wrong with it shows before the heavy imports.
    tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    prompts, held_out = prompts_of(config, tokenizer, check=partial(check_prompts, config.reward))
    ptx = ptx_of(config, tokenizer)
    reward = create(config.reward, tokenizer.decode)

    from rftmega.strategy.joining import joined
    from rftmega.strategy.megatron import MegatronStrategy
    from rftmega.strategy.watching import watch
    from rftmega.trainer import Algorithm
    from rftmega.trainer.observers import evaluation_of_prompts

    with joined(config) as (world, stop):
        strategy = MegatronStrategy(config, world, stop_ids=tokenizer.stop_ids)
        learnt = MajorityReward(tokenizer.decode) if config.reward.majority else reward
        trainer = Algorithm(config).reinforced(strategy, learnt, ptx=ptx, stop=stop)
        evaluation = evaluation_of_prompts(config, held_out, reward)
        watch(trainer, strategy, config, prompts, evaluation, tokenizer, is_main=world.is_main)
        trainer.fit(prompts, steps=config.trainer.steps)
        strategy.close()
    return config.faults.requeue_code if trainer.stopped else 0


def supervise(config: RunConfig) -> int:
    """From given answers to a policy, or from preferences to a reward model."""
    from rftmega.data import Tokenizer, given_of

    tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    rows, held_out = given_of(config, tokenizer)

    from rftmega.strategy.joining import joined
    from rftmega.strategy.supervised import SupervisedStrategy
    from rftmega.strategy.watching import watch
    from rftmega.trainer import Algorithm
    from rftmega.trainer.observers import evaluation_of_rows

    with joined(config) as (world, stop):
        strategy = SupervisedStrategy(config, world)
        trainer = Algorithm(config).supervised(strategy, stop=stop)
        evaluation = evaluation_of_rows(config, held_out, strategy.model)
        watch(trainer, strategy, config, rows, evaluation, tokenizer, is_main=world.is_main)
        trainer.fit(rows, steps=config.trainer.steps)
    return config.faults.requeue_code if trainer.stopped else 0


def main() -> int:
    return command_line.run(train, __doc__)


if __name__ == "__main__":
    command_line.prepare()
    sys.exit(main())
