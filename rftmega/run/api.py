"""`train` runs a training from Python: in a script, a notebook, or for the command line.

Importing this costs nothing.
"""

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.config.options.environments import GivenEnvironment, give_environment
from rftmega.config.user_code.functions import RewardFunction, give
from rftmega.core.errors import ConfigError, RanksFailed
from rftmega.monitoring.history import read_history
from rftmega.run.hub import fetched
from rftmega.run.hub_upload import claim, upload
from rftmega.run.notebook import progress
from rftmega.run.run_result import RunResult
from rftmega.run.train import task_of
from rftmega.runtime.parallel.folder_lock import locked
from rftmega.runtime.parallel.orphans import end_with_parent
from rftmega.runtime.parallel.private import private_files

PACKAGE = "rftmega."
# packages that warn of what is not installed, or of each other; and of how this one imports them
OTHERS = r"(megatron|vllm|torch|transformers|torchao|triton|rftmega|importlib)\b"


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    *,
    processes: int | None = None,
    overrides: Sequence[str] = (),
    rewards: Sequence[RewardFunction | str] | None = None,
    environment: Any = None,
) -> RunResult:
    """Trains as `train_rl.py CONFIG [option=value ...] --processes N` does, and waits for the end.

    `config` is a YAML file or the dictionary that it would hold, over which `overrides` go
    ("trainer.steps=2"), or a whole RunConfig.
    `processes` ranks of this machine are started; None: this process is a rank itself, alone or
    beside those that a launcher (torchrun) has started. `rewards` are functions f(prompts,
    completions, **columns) -> list of numbers, in place of `reward.functions` (docs/rewards.md);
    those of a notebook, closures and lambdas reach the ranks as well. So does an `environment`: an
    object with `async def run(self, task, model)`, or its class, which is called with the tokenizer
    (docs/environments.md).

    Raises ConfigError that lists all that is wrong, RanksFailed where a rank died (the launcher
    writes which and why), KeyboardInterrupt after all ranks were ended, and what a rank raises that
    is the user's to mend.
    """
    functions = [function for function in rewards or () if not isinstance(function, str)]
    named = give(functions)
    talk = None if environment is None else give_environment(environment)
    run = fetched(_read(config, overrides, _references(rewards, named), talk))
    with private_files():
        check(run, processes)
        is_main = os.environ.get("RANK", "0") == "0"
        if is_main:
            claim(run)
        if processes is None:
            end_with_torchrun()
            with folders_locked(run), quiet_imports(), memory_given_back():
                code = task_of(run)(run)
        else:
            if threading.current_thread() is not threading.main_thread():
                raise ConfigError("rftmega.train starts ranks from the main thread only.")
            with progress(run):
                code = launched(processes, run, sent(functions, environment))
        if code == 0 and is_main:
            upload(run)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code not in (0, run.faults.requeue_code):
        raise RanksFailed.with_code(code)
    output = Path(run.trainer.output)
    *_, last = [{}, *read_history(output / "metrics.jsonl")]
    return RunResult(dict(last), output, code != 0, code)


def _read(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str],
    references: list[str] | None,
    environment: str | None,
) -> RunConfig:
    """Reads the config, with `references` in place of its reward functions and the environment of
    this name in place of its own, where there are any.
    """
    if not isinstance(config, RunConfig):
        chosen = [] if references is None else [f"reward.functions={json.dumps(references)}"]
        if environment is not None:
            chosen += ["environment.type=python", f"environment.name={environment}"]
        return configuration.load(config, [*overrides, *chosen])
    if overrides:
        raise ConfigError(
            "overrides go over a YAML file or a dictionary; of a RunConfig, change the fields."
        )
    if references is not None:
        config = replace(config, reward=replace(config.reward, functions=references))
    if environment is not None:
        config = replace(config, environment=GivenEnvironment(name=environment))
    return config


def _references(
    rewards: Sequence[RewardFunction | str] | None, named: Sequence[str]
) -> list[str] | None:
    """Returns the references of `rewards`, of which `named` are those that are functions."""
    if rewards is None:
        return None
    names = iter(named)
    return [reward if isinstance(reward, str) else next(names) for reward in rewards]


def sent(functions: Sequence[RewardFunction], environment: Any = None) -> bytes:
    """Returns functions and an environment as bytes that another process can read, wherever they
    were defined.

    Raises ConfigError for one that holds what no other process can have.
    """
    if not functions and environment is None:
        return b""
    import cloudpickle

    named = [("rewards", function) for function in functions]
    named += [] if environment is None else [("environment", environment)]
    for name, given in named:
        try:
            cloudpickle.dumps(given)
        except Exception as error:
            raise ConfigError(
                f"{name}: {given!r} can't be sent to the ranks: {error}. Make inside it what it can't take along."
            ) from error
    found: bytes = cloudpickle.dumps((list(functions), environment))
    return found


def functions_given(sent: bytes) -> None:
    """Makes functions and environment known to this rank, as `sent` gives them."""
    if sent:
        import cloudpickle

        functions, environment = cloudpickle.loads(sent)
        give(functions)
        if environment is not None:
            give_environment(environment)


def check(config: RunConfig, processes: int | None) -> None:
    """Refuses what can't run on so many processes of this machine (None: those that a launcher has
    started). Raises ConfigError, or another error of ours.
    """
    from rftmega.run import preflight
    from rftmega.runtime.parallel import preemption
    from rftmega.runtime.parallel.process_group import check_launcher, launched_size

    check_launcher()
    if not config.checkpoint.every and preemption.listens():
        preemption.unlisten()
    size = launched_size() if processes is None else processes
    preflight.preflight(config, size, local=processes is not None)


def launched(processes: int, config: RunConfig, functions: bytes) -> int:
    """Trains in so many ranks of this machine. Returns the exit code."""
    from rftmega.run import preflight
    from rftmega.run.local_launcher import launch
    from rftmega.runtime.parallel import preemption

    if preemption.asked():  # ranks would each have to agree on it
        return config.faults.requeue_code
    preload = ["rftmega.run.preloaded", *preflight.slow_modules(config)]
    restarts, saves = config.faults.max_restarts, config.checkpoint.every > 0
    with folders_locked(config):
        return launch(
            processes, rank, config, functions, preload=preload, max_restarts=restarts, stops=saves
        )


def end_with_torchrun() -> None:
    """Ends this rank with torchrun, where that started it: peers of a rank whose agent was killed
    would wait for ever.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid(), signal.SIGKILL)


@contextlib.contextmanager
def folders_locked(config: RunConfig) -> Iterator[None]:
    """Keeps other runs from writing where this one does, within a `with` block.

    The launcher holds the locks, which outlives its ranks; without one the first rank. Raises
    LockedError.
    """
    folders = {Path(config.trainer.output).resolve()}
    if config.checkpoint.every and config.checkpoint.folder:
        folders.add(Path(config.checkpoint.folder).resolve())
    if config.strategy == "separate" and config.rollout.weights_folder:
        folders.add(Path(config.rollout.weights_folder).resolve())
    with contextlib.ExitStack() as held:
        if os.environ.get("RANK", "0") == "0":
            for folder in sorted(folders):
                held.enter_context(locked(folder, "run"))
        yield


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hides what other packages warn of, in a program whose own warnings stay, within a `with` block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=OTHERS)
        yield


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Frees models and engines where a `with` block raises: the error's traceback would hold them as
    long as a notebook shows it. Variables of a user's own functions stay, for a debugger.
    """
    try:
        yield
    except BaseException as error:
        for frame in _frames(error):
            if frame.f_globals.get("__name__", "").startswith(PACKAGE):
                with contextlib.suppress(RuntimeError):  # it runs: this one, and who called it
                    frame.clear()
        gc.collect()
        raise


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yields the frames of the error's traceback, and of those of the errors that led to it."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            yield frame
        error = error.__cause__ or error.__context__


def rank(config: RunConfig, functions: bytes) -> int:
    """Runs one process of a run that `processes` started. Returns its exit code."""
    prepare()
    functions_given(functions)
    return task_of(config)(config)


def prepare() -> None:
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("rftmega").setLevel(logging.INFO)
    if (
        os.environ.get("RANK", "0") != "0"
    ):  # every process reads the same records, one tells of them
        logging.getLogger("rftmega.data").setLevel(logging.ERROR)
