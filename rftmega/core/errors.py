"""Defines a user's errors, one class a kind.

Each message says what was given, why it cannot work and what to change.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

SHOWN = 80  # characters of a value that an error quotes


def described(error: BaseException, *, call: bool = False) -> str:
    """Returns the class and the message of an error of foreign code, whose own methods may fail;
    `call`: as Python writes the call that makes it.
    """
    name = type(error).__name__
    try:
        return repr(error) if call else f"{name}: {error}"
    except BaseException:  # a SystemExit as well: it would end the thread that tells of the error
        return f"{name}, which can't be told: it fails as well"


class RFTMegaError(Exception):
    """Base of every error that is the user's to mend; `train_rl.py` prints it without a traceback."""

    exit_code = 2  # of the program; docs/fault_tolerance.md lists all of them

    @classmethod
    def listing(cls, what: str, reasons: Iterable[str]) -> Self:
        """Builds an error of several reasons, a line each."""
        return cls(f"{what}:\n" + "\n".join(f"  - {reason}" for reason in reasons))


class ConfigError(RFTMegaError):
    """An option, a layout or a path that cannot work."""


class DataError(RFTMegaError):
    """A data file that cannot be used; names the file and the line."""

    @classmethod
    def first_of(cls, problems: Sequence[str]) -> Self:
        """Builds an error of the first ten, a line each, and how many more there are."""
        more = len(problems) - 10
        return cls("\n".join([*problems[:10], *([f"... and {more} more."] if more > 0 else [])]))


class LockedError(RFTMegaError):
    """A folder that another program works in, or that can't be locked; names the process that holds
    it.
    """


class CheckpointError(RFTMegaError):
    """A model folder or checkpoint that is missing, incomplete or of another model."""


class OutputError(RFTMegaError, OSError):
    """A file of the run's output that can't be written; names it."""


class WeightMismatch(RFTMegaError):
    """Tensors on the two sides of a conversion or a push do not correspond."""


class EngineError(RFTMegaError):
    """The rollout engine was asked for something it cannot do in its present state."""


class EngineFault(EngineError):
    """An engine, or the process at the other end, is gone or hangs: nobody's mistake, and the run
    can be started again.
    """

    exit_code = 1


class Diverged(RFTMegaError):
    """A run whose optimizer steps are all skipped: started again it would be no better."""

    exit_code = 76


class NothingTrained(RFTMegaError):  # noqa: N818  it tells what happened
    """A step whose loss has a gradient that reaches no parameter: more such steps would not help."""

    exit_code = 76


class RewardError(RFTMegaError):
    """An answer that can't be scored: a prompt's kind without weights, a remote reward that fails,
    a score that is no number.
    """


class ContextTooLong(EngineError):  # noqa: N818  an environment may catch it, and end there
    """An environment asked for an answer to a context that leaves no room for one."""


class EnvironmentFailed(RFTMegaError):  # noqa: N818  it tells what happened
    """A user's environment raised an error in a rollout; names it and the prompt."""

    exit_code = 1


class InfrastructureFault(RFTMegaError):  # noqa: N818  the policy is not to blame
    """Something that a rollout needs (a tool's server, a sandbox) is gone: the rollout is run again,
    and left out where that does not help.
    """

    exit_code = 1


class GapExceeded(RFTMegaError):  # noqa: N818  the finding's name
    """Engine and trainer give other probabilities to the same tokens: answers that must not be
    learnt from.
    """

    exit_code = 77


class NodeError(RFTMegaError):
    """A host of the run that lacks something, or is not like the others; names the host and a rank
    on it.
    """


class NodeFault(NodeError):
    """NodeFault reports a host that lacks something which may be there when the run is started
    again.
    """

    exit_code = 1


class RanksFailed(RFTMegaError):  # noqa: N818  it tells what happened
    """A run of several ranks that ended because one of them died, or because of a signal; its
    launcher has written which and why.
    """

    exit_code = 1

    @classmethod
    def with_code(cls, code: int) -> Self:
        """Builds the error for a run that ended with this exit code."""
        error = cls(f"The run ended with exit code {code}; what was written before says why.")
        error.exit_code = code
        return error


FAULTS = (EngineFault, NodeFault)
# starting again would not mend it
FINAL_CODES = (RFTMegaError.exit_code, Diverged.exit_code, GapExceeded.exit_code)


class Preempted(Exception):  # noqa: N818  nothing went wrong
    """The run is asked to stop, on all processes alike.

    `answers`: of a rollout, None for those that are not there.
    """

    def __init__(self, completions: Sequence[Any] = ()):
        super().__init__()
        self.completions = completions


def exit_code_of(work: Callable[..., int], *given: object) -> int:
    """Returns what `work`(*given) returns.

    Where that raises an error of ours, the error's code, after the message on stderr.
    """
    try:
        return work(*given)
    except RFTMegaError as error:
        return reported(error)


def shown(value: Any) -> str:
    """Returns a value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def reported(error: RFTMegaError) -> int:
    """Writes the error's message to stderr. Returns its exit code."""
    where = (
        f"[rank {os.environ.get('RANK', '0')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    )
    sys.stderr.write(f"{where}error: {error}\n")
    return error.exit_code
