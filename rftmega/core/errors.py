"""Errors that the user can fix, one class per kind, with their exit codes.

Each message states what was given, why it cannot work and what to change.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

SHOWN = 80  # characters of a value that an error quotes


def described(error: BaseException, *, call: bool = False) -> str:
    """Returns "class name: message" of an exception from foreign code, or its repr if `call` is
    True. Never raises, even if the exception's own methods fail.
    """
    name = type(error).__name__
    try:
        return repr(error) if call else f"{name}: {error}"
    except BaseException:  # including SystemExit, which would end the thread that reports the error
        return f"{name}, which can't be told: it fails as well"


class RFTMegaError(Exception):
    """Base class of every error that the user can fix; `rftmega train` prints it without a traceback."""

    exit_code = 2  # of the program; docs/fault_tolerance.md lists all of them

    @classmethod
    def listing(cls, what: str, reasons: Iterable[str]) -> Self:
        """Builds an error whose message is `what` and a colon, followed by one line per reason."""
        return cls(f"{what}:\n" + "\n".join(f"  - {reason}" for reason in reasons))


class ConfigError(RFTMegaError):
    """An option, a layout or a path that cannot work."""


class DataError(RFTMegaError):
    """A data file that cannot be used; the message names the file and the line."""

    @classmethod
    def first_of(cls, problems: Sequence[str]) -> Self:
        """Builds an error from the first ten problems, one per line, and the number of further
        problems. Problems that differ in their place only ("file:3: what is wrong") are one line,
        with their number.
        """
        places: dict[str, list[str]] = {}
        for problem in problems:
            _, colon, reason = problem.partition(": ")
            places.setdefault(reason if colon else problem, []).append(problem)
        lines = [
            f"{alike[0]} (the same in {len(alike) - 1} more places)" if len(alike) > 1 else alike[0]
            for alike in places.values()
        ]
        more = sum(map(len, list(places.values())[10:]))
        return cls("\n".join([*lines[:10], *([f"... and {more} more."] if more > 0 else [])]))


class LockedError(RFTMegaError):
    """A folder that is in use by another program, or that cannot be locked; the message names the
    process that holds the lock.
    """


class CheckpointError(RFTMegaError):
    """A model folder or checkpoint that is missing, incomplete or belongs to another model."""


class OutputError(RFTMegaError, OSError):
    """An output file of the run that cannot be written; the message names the file."""


class WeightMismatch(RFTMegaError):
    """Tensors at source and target of a weight conversion or weight sync (push) do not correspond."""


class EngineError(RFTMegaError):
    """The rollout engine was asked for something that its present state does not allow."""


class EngineFault(EngineError):
    """An engine, or the process at the other end of a connection, is gone or hangs: an
    infrastructure fault, after which the run can be started again.
    """

    exit_code = 1


class Diverged(RFTMegaError):
    """Gradients were not finite in too many successive steps, so no optimizer step was taken;
    starting the run again would not help.
    """

    exit_code = 76


class NothingTrained(RFTMegaError):  # noqa: N818  named after the event
    """The loss has a gradient, but the trained parameters get none; further steps would not help."""

    exit_code = 76


class RewardError(RFTMegaError):
    """A completion that cannot be scored: its prompt's task type has no reward weights, a remote
    reward fails, or a score is not a number.
    """


class ContextTooLong(EngineError):  # noqa: N818  an environment may catch it, and end there
    """An environment requested a completion of a context that leaves no room for a completion."""


class EnvironmentFailed(RFTMegaError):  # noqa: N818  named after the event
    """A user's environment raised an error in a rollout; the message names the environment and the
    prompt.
    """

    exit_code = 1


class InfrastructureFault(RFTMegaError):  # noqa: N818  the policy is not to blame
    """A service that a rollout needs (a tool's server, a sandbox) is gone. The rollout is run
    again; if the repetitions fail too, it is left out of training.
    """

    exit_code = 1


class GapExceeded(RFTMegaError):  # noqa: N818  the finding's name
    """The log-probs that engine and trainer compute for the same tokens differ too much
    (train-inference mismatch) to train on these completions.
    """

    exit_code = 77


class NodeError(RFTMegaError):
    """A host of the run lacks something or differs from the other hosts; the message names the host
    and a rank on it.
    """


class NodeFault(NodeError):
    """A host lacks something that may be available when the run is started again, so a restart may
    help.
    """

    exit_code = 1


class RanksFailed(RFTMegaError):  # noqa: N818  named after the event
    """A run of several ranks ended because one of them died or because of a signal; its launcher
    has already printed the rank and the reason.
    """

    exit_code = 1

    @classmethod
    def with_code(cls, code: int) -> Self:
        """Builds the error of a run that ended with this exit code."""
        error = cls(f"The run ended with exit code {code}; what was written before says why.")
        error.exit_code = code
        return error


FAULTS = (EngineFault, NodeFault)
# errors after which starting the run again would not help
FINAL_CODES = (RFTMegaError.exit_code, Diverged.exit_code, GapExceeded.exit_code)


class Preempted(Exception):  # noqa: N818  nothing went wrong
    """Raised on all processes when the run is asked to stop.

    `completions`: the completions of the current rollout, None for each unfinished one.
    """

    def __init__(self, completions: Sequence[Any] = ()):
        super().__init__()
        self.completions = completions


def exit_code_of(work: Callable[..., int], *given: object) -> int:
    """Calls `work`(*given) and returns its result.

    If it raises an RFTMegaError, prints the message to stderr and returns the error's exit code.
    """
    try:
        return work(*given)
    except RFTMegaError as error:
        return reported(error)


def shown(value: Any) -> str:
    """Returns the repr of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def reported(error: RFTMegaError) -> int:
    """Writes the error's message to stderr and returns its exit code."""
    where = (
        f"[rank {os.environ.get('RANK', '0')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    )
    sys.stderr.write(f"{where}error: {error}\n")
    return error.exit_code
