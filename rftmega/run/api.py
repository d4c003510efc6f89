"""Defines `train`, which runs a training from a script, a notebook or the command line.

Importing this module loads no heavy package.
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
from typing import Any, TextIO

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
BEATS = 5.0  # touches of a folder's lock within a lease
# packages whose import-time warnings are hidden, such as those about missing optional packages
OTHERS = r"(megatron|vllm|torch|transformers|torchao|triton|rftmega|importlib)\b"


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    *,
    processes: int | None = None,
    overrides: Sequence[str] = (),
    rewards: Sequence[RewardFunction | str] | None = None,
    environment: Any = None,
) -> RunResult:
    """Runs a training as `rftmega train CONFIG [option=value ...] --processes N` does. Returns its
    result when it has ended.

    `config` is the path of a YAML file, a dictionary with the same content, or a complete
    RunConfig. `overrides` ("trainer.steps=2") are applied on top of a file or dictionary.

    `processes` ranks are started on this machine; with None this process is itself a rank, alone or
    as one of those started by a launcher (torchrun). `rewards` are functions f(prompts,
    completions, **columns) -> list of numbers that replace `reward.functions` (docs/rewards.md);
    functions defined in a notebook, closures and lambdas are sent to the ranks as well.
    `environment` replaces the environment of the config: an object with
    `async def run(self, task, model)`, or its class, which is called with the tokenizer
    (docs/environments.md). It is sent to the ranks, too.

    Raises a ConfigError that lists every problem of the config, RanksFailed if a rank died (the
    launcher prints which rank and why), KeyboardInterrupt after all ranks were ended, and any
    RFTMegaError that a rank raised.
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
    """Returns the RunConfig of `config` (see `train`) with `overrides` applied.

    `references`: value for `reward.functions`, None leaves it; `environment`: the name under which
    `train` registered a Python environment, which replaces the config's environment, or None.
    Raises ConfigError for overrides of a RunConfig.
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
    """Returns the value of `reward.functions` for `rewards`, or None if `rewards` is None: strings
    stay, and each function is replaced by the name under which it was registered.

    `named`: these names, in the order of the functions.
    """
    if rewards is None:
        return None
    names = iter(named)
    return [reward if isinstance(reward, str) else next(names) for reward in rewards]


def sent(functions: Sequence[RewardFunction], environment: Any = None) -> bytes:
    """Returns the reward functions and the environment (see `train`) serialized with cloudpickle
    for the ranks, or b"" if there are none.

    Raises ConfigError for an object that can't be pickled.
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
    """Registers on this rank the reward functions and the environment that `sent`, the return value
    of the function `sent` in the launcher, contains.
    """
    if sent:
        import cloudpickle

        functions, environment = cloudpickle.loads(sent)
        give(functions)
        if environment is not None:
            give_environment(environment)


def check(config: RunConfig, processes: int | None) -> None:
    """Raises ConfigError or another RFTMegaError if the config can't run on `processes` ranks of
    this machine (None: on the ranks that a launcher has started).
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
    """Trains with `processes` ranks on this machine. Returns the exit code of the run.

    `functions`: the rewards and the environment, as serialized by `sent`.
    """
    from rftmega.run import preflight
    from rftmega.run.local_launcher import launch
    from rftmega.runtime.parallel import preemption

    if preemption.asked():  # asked to stop before any rank has started
        return config.faults.requeue_code
    preload = ["rftmega.run.preloaded", *preflight.slow_modules(config)]
    restarts, saves = config.faults.max_restarts, config.checkpoint.every > 0
    with folders_locked(config):
        return launch(
            processes, rank, config, functions, preload=preload, max_restarts=restarts, stops=saves
        )


def end_with_torchrun() -> None:
    """Makes the kernel kill this rank when the torchrun agent that started it ends: otherwise the
    peers of a rank whose agent was killed would wait for ever.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid(), signal.SIGKILL)


@contextlib.contextmanager
def folders_locked(config: RunConfig, *, lease: float | None = None) -> Iterator[None]:
    """Locks the run's output folders against other runs within a `with` block.

    The launcher holds the locks, since it outlives its ranks; without a launcher the first rank
    does. `lease`: seconds without a sign after which a lock of this run's own earlier ranks, whose
    node has failed, is taken over; None for a run whose ranks are not started again elsewhere.
    Raises LockedError if another run holds one of the locks.
    """
    beat = None if lease is None else lease / BEATS
    folders = {Path(config.trainer.output).resolve()}
    if config.checkpoint.every and config.checkpoint.folder:
        folders.add(Path(config.checkpoint.folder).resolve())
    if config.strategy == "separate" and config.rollout.weights_folder:
        folders.add(Path(config.rollout.weights_folder).resolve())
    with contextlib.ExitStack() as held:
        if os.environ.get("RANK", "0") == "0":
            for folder in sorted(folders):
                held.enter_context(
                    locked(folder, "run", beat=beat, stale=lease, patient=lease is not None)
                )
        yield


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hides warnings of third-party packages within a `with` block; warnings of the caller's code
    are still shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=OTHERS)
        yield


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Frees models and engines if a `with` block raises: otherwise the error's traceback would keep
    them in memory as long as a notebook shows it. Local variables of user functions are kept for a
    debugger.
    """
    try:
        yield
    except BaseException as error:
        for frame in _frames(error):
            if frame.f_globals.get("__name__", "").startswith(PACKAGE):
                with contextlib.suppress(RuntimeError):  # the frame is still executing
                    frame.clear()
        gc.collect()
        raise


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yields the frames in the tracebacks of an error and of its causes."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            yield frame
        error = error.__cause__ or error.__context__


def rank(config: RunConfig, functions: bytes) -> int:
    """Runs one rank that `train(processes=N)` started. Returns its exit code.

    `functions`: the rewards and the environment, as serialized by `sent`.
    """
    prepare()
    functions_given(functions)
    return task_of(config)(config)


def prepare(*, logs: TextIO | None = None) -> None:
    """Hides warnings, and shows this package's log messages on `logs`, by default stdout."""
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=logs or sys.stdout)
    logging.getLogger("rftmega").setLevel(logging.INFO)
    if os.environ.get("RANK", "0") != "0":  # all processes read the same records, one logs
        logging.getLogger("rftmega.data").setLevel(logging.ERROR)
