"""Reinforcement fine-tuning of a language model: parse the config, build a strategy, run a trainer."""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.errors import EngineFault, RFTMegaError


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="train_rl.py CONFIG [option=value ...] [--processes N] [--dry-run]",
        epilog="Options, their defaults and meaning (CONFIG is a YAML file of them):\n" + configuration.option_reference(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="option=value", default=[], help="dotted overrides, e.g. parallel.tensor=2"
    )
    parser.add_argument("--processes", type=int, help="start this many processes here (otherwise launch with torchrun)")
    parser.add_argument("--dry-run", action="store_true", help="print layout, batch arithmetic and parameters a rank, and exit")
    return parser.parse_intermixed_args()


def main() -> int:
    given = arguments()
    from rftmega.parallel.launch import launched_rank, launched_size

    try:
        return start(given)
    except RFTMegaError as error:
        where = f"[rank {launched_rank()}] " if launched_size() > 1 else ""
        sys.stderr.write(f"{where}error: {error}\n")
        return 1 if isinstance(error, EngineFault) else 2
    except KeyboardInterrupt:
        return 130


def start(given: argparse.Namespace) -> int:
    """Checks the config, then trains: here, or in `--processes` ranks of this machine. The exit code."""
    from rftmega.parallel.launch import check_launcher, launched_size
    from rftmega.strategy import preflight

    check_launcher()
    processes = launched_size() if given.processes is None else given.processes
    config = configuration.load(given.config, given.overrides)
    preflight.preflight(config, processes, local=given.processes is not None)
    if given.dry_run:
        sys.stdout.write(preflight.dry_run(config, processes) + "\n")
        return 0
    if given.processes is None:
        return train(config)
    from rftmega.parallel.local import launch

    preload = ["rftmega.strategy.preloaded", *preflight.engine_modules(config)]
    saves = config.checkpoint.every > 0
    return launch(processes, rank, config, preload=preload, max_restarts=config.faults.max_restarts, stops=saves)


def rank(config: RunConfig) -> int:
    """One process of a run started by `--processes`; its exit code."""
    prepare()
    return train(config)


def prepare() -> None:
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("rftmega").setLevel(logging.INFO)


def train(config: RunConfig) -> int:
    """One run, from data to an exported model. The exit code."""
    return reinforce(config) if config.algorithm.task == "rl" else supervise(config)


def supervise(config: RunConfig) -> int:
    """From given answers to a policy, or from preferences to a reward model."""
    from rftmega.data import Tokenizer, load_preferences, load_supervised, order_of, pair_rows, rows_of

    sft, steps = config.algorithm.task == "sft", config.trainer.steps
    tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    read, rows = (load_supervised, rows_of) if sft else (load_preferences, pair_rows)

    def load(source: str) -> list[Any]:
        prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
        return list(read(source, tokenizer, config.data, max_prompt_tokens=prompt, max_response_tokens=response))

    order = order_of(config.data, load, batch_size=config.trainer.prompts_per_step, seed=config.trainer.seed)
    held_out = {name: rows(load(source)) for name, source in config.data.held_out.items()}

    from rftmega.algorithms.supervised import cross_entropy_loss, pairwise_loss
    from rftmega.algorithms.weighting import weighting_of
    from rftmega.parallel import launch, nodes
    from rftmega.parallel.progress import watched
    from rftmega.strategy import disk
    from rftmega.strategy.supervised import SupervisedStrategy
    from rftmega.strategy.watching import measures_of, timeline_of
    from rftmega.trainer import observers
    from rftmega.trainer.supervised import SupervisedTrainer, cross_entropy_of, preference_of

    with launch.start() as world, watched(config.faults.watchdog_seconds, world.rank), requests(config) as stop:
        nodes.check_nodes(world, disk.needed(config))
        strategy = SupervisedStrategy(config, world)
        model: Any = strategy.model
        judge = partial(cross_entropy_of if sft else preference_of, model)
        name = "policy" if sft else "reward_model"
        watching = observers.supervised(
            config,
            held_out,
            judge,
            lambda: strategy.export(f"{config.trainer.output}/{name}"),
            is_main=world.is_main,
            measures=measures_of(config),
        )
        weighting = weighting_of(config.algorithm.weighting, longest=config.rollout.max_response_tokens)
        trainer = SupervisedTrainer(
            model=strategy,
            loss_fn=cross_entropy_loss(weighting) if sft else pairwise_loss(),
            group_size=1 if sft else 2,
            callbacks=watching,
            stop=stop,
        )
        resume_and_save(config, strategy.checkpoints, {"data": order, "trainer": trainer}, watching)
        watching += timeline_of(config, strategy.topology)  # after all that it records
        trainer.fit(map(rows, order), steps=steps)
    return config.faults.requeue_code if trainer.stopped else 0


def reinforce(config: RunConfig) -> int:
    """From prompts to a policy that answers them better."""
    from rftmega.data import PromptOrder, Tokenizer, load_prompts, load_supervised, order_of, rows_of
    from rftmega.rewards import MajorityReward, check_prompts, create
    from rftmega.types import Prompt

    # Data first: what is wrong with it shows before the heavy imports.
    tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)

    def load(source: str) -> list[Prompt]:
        prompts = load_prompts(source, tokenizer, config.data, max_prompt_tokens=config.rollout.max_prompt_tokens)
        if not config.reward.majority:
            check_prompts(config.reward, prompts)
        return prompts

    order = order_of(config.data, load, batch_size=config.trainer.prompts_per_step, seed=config.trainer.seed)
    held_out = {name: load(source) for name, source in config.data.held_out.items()}
    given = None
    if config.data.ptx:
        limits = {
            "max_prompt_tokens": config.rollout.max_prompt_tokens,
            "max_response_tokens": config.rollout.max_response_tokens,
        }
        examples = load_supervised(config.data.ptx, tokenizer, config.data, **limits)
        given = PromptOrder(examples, batch_size=config.trainer.prompts_per_step, seed=f"{config.trainer.seed}/ptx")
    reward = create(config.reward, tokenizer.decode)

    from rftmega.experience import ModelReward
    from rftmega.parallel import launch, nodes
    from rftmega.parallel.progress import watched
    from rftmega.strategy import disk
    from rftmega.strategy.megatron import MegatronStrategy
    from rftmega.strategy.watching import measures_of, timeline_of
    from rftmega.trainer import Algorithm, PPOTrainer, Refill, observers

    with launch.start() as world, watched(config.faults.watchdog_seconds, world.rank), requests(config) as stop:
        nodes.check_nodes(world, disk.needed(config))
        strategy = MegatronStrategy(config, world, stop_ids=tokenizer.stop_ids)
        watching = observers.reinforced(
            config,
            held_out,
            reward,
            lambda: strategy.export(f"{config.trainer.output}/policy"),
            decode=tokenizer.decode,
            pieces=tokenizer.pieces,
            is_main=world.is_main,
            measures=measures_of(config),
        )
        algorithm = Algorithm(config)
        trainer = PPOTrainer(
            engine=strategy.engine,
            weights=strategy.weights,
            reward=MajorityReward(tokenizer.decode) if config.reward.majority else reward,
            maker=algorithm.maker(strategy.policy, strategy.critic),
            learner=algorithm.learner(strategy.policy, strategy.critic, algorithm.ptx(given, rows_of) if given else None),
            model_reward=ModelReward(strategy.reward_model, config.reward.model) if strategy.reward_model else None,
            refill=Refill(
                config.algorithm.refill_rounds, part=config.algorithm.refill_by, oversample=config.algorithm.oversample
            ),
            replay=algorithm.replay(strategy.policy),
            learnt_from=config.algorithm.learnt_from,
            samples_per_prompt=config.rollout.samples_per_prompt,
            temperature=config.rollout.temperature,
            seed=config.trainer.seed,
            callbacks=watching,
            stop=stop,
        )
        parts = {"data": order, "trainer": trainer} | ({"ptx": given} if given else {})
        resume_and_save(config, strategy.checkpoints, parts, watching)
        watching += timeline_of(config, strategy.topology)  # after all that it records
        trainer.fit(order, steps=config.trainer.steps)
        strategy.close()
    return config.faults.requeue_code if trainer.stopped else 0


@contextmanager
def requests(config: RunConfig) -> Iterator[Callable[[], bool]]:
    """Within, a run that saves takes signals for requests to stop; gives what says whether there was one."""
    from rftmega.parallel import stop

    if not config.checkpoint.every:
        yield lambda: False
        return
    with stop.listening():
        yield stop.agreed


def resume_and_save(config: RunConfig, checkpoints: Any, parts: dict[str, Any], watching: list[Any]) -> None:
    """Goes on from a checkpoint where checkpoint.* says so, and has the run saved after what is `watching` it."""
    from rftmega.trainer.checkpointing import Checkpointing, resume

    chosen = config.checkpoint
    if (chosen.every or chosen.resume not in ("auto", "none")) and (state := checkpoints.resume()) is not None:
        resume(parts, state)
    if chosen.every:
        watching.append(Checkpointing(checkpoints, parts, every=chosen.every, last=config.trainer.steps))


if __name__ == "__main__":
    prepare()
    sys.exit(main())
