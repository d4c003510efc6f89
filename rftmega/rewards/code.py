"""Code reward: runs the program of a response against tests. docs/rewards.md describes what the
sandbox guarantees.

Tests run in a separate process that talks to the answer's process through pipes, and outputs of
programs are compared outside the sandbox, where an answer cannot interfere. Only with `inside` do
tests run in the answer's interpreter, where an answer that knows this module's code can forge a
pass.
"""

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rftmega.core.errors import RewardError
from rftmega.rewards.code_labels import read_tests
from rftmega.rewards.part import Answer, Undecided

log = logging.getLogger(__name__)
_BLOCK = re.compile(r"```(?:python|py)3?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_ANY_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
# Solutions of tasks that give only a function's head, as LeetCode does, expect these names.
PRELUDE = """from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
"""
ROOT = Path(__file__).parents[2]
GRACE = 60.0  # seconds for the sandbox itself to start and end, on a busy machine
SELF_TEST = 60.0  # time limit of the sandbox's self-test, in seconds
MARGIN = 4096  # bytes by which an output may exceed the expected one, for white space


def code_of(response: str) -> str:
    """Returns the last closed ```python block, else the last closed block that names no language,
    or the whole response if there is none.
    """
    blocks = _BLOCK.findall(response)
    blocks = blocks or [
        text for language, text in _ANY_BLOCK.findall(response) if not language.strip()
    ]
    return blocks[-1] if blocks else response


def same_output(found: str, expected: str) -> bool:
    """Returns whether the lines of two outputs are equal, except for white space at the end of
    lines and empty lines at the end.
    """
    return _lines(found) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


class CodePart:
    """CodePart is the reward component that runs the programs in responses against tests, up to
    `workers` programs at a time over all calling threads.
    """

    def __init__(self, *, workers: int, seconds: float, memory_mib: int, inside: bool = False):
        """`seconds`: time limit of all tests of one response together; `memory_mib`: memory limit
        of one program in MiB. `inside`: tests run in the interpreter of the response's program,
        which can then forge the result.
        """
        self.inside = inside
        self.seconds, self.memory = seconds, memory_mib << 20
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="code-reward")
        self.namespaces: bool | None = None  # whether they are available; None: not checked yet
        self.tested, self.testing = False, threading.Lock()

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """Returns one score per response: 1 if its program passes all tests of its label, else 0.

        Raises RewardError if a label has no tests, or if no sandbox is available.
        """
        self.test()
        return list(self.threads.map(self._score, answers))

    def test(self) -> None:
        """Tests, on the first call only, whether the sandbox works and can import the usual
        modules; raises RewardError if it cannot.
        """
        with self.testing:
            if self.tested:
                return
            outcome = self._run({"namespaces": self.namespaces, "imports": True})
            if isinstance(outcome, Undecided):
                raise RewardError(
                    "reward.code: the sandbox fails on this machine; the warning above says how."
                )
            if outcome["failed"]:
                raise RewardError(f"reward.code: {outcome['failed']}.")
            self.tested = True

    def _score(self, answer: Answer) -> float:
        try:
            tests = read_tests(answer.label)
        except ValueError as error:
            raise RewardError(f"reward.code: {error}.") from error
        code = code_of(answer.response)
        try:
            code.encode()
            if not code.strip():
                return 0.0
        except UnicodeEncodeError:
            return 0.0
        job = {
            "answer": code,
            "seconds": self.seconds,
            "memory": self.memory,
            "namespaces": self.namespaces,
        }
        if "calls" in tests:
            # an import from __future__ must stay the first statement
            before = "" if "__future__" in code else PRELUDE
            calls = {"calls": True, "inside": False, "tests": json.dumps(tests["calls"])}
            outcome = self._run(job | {"answer": before + code} | calls)
            return outcome if isinstance(outcome, Undecided) else float(outcome["passed"])
        if "tests" in tests:
            outcome = self._run(job | {"inside": self.inside} | tests)
            return outcome if isinstance(outcome, Undecided) else float(outcome["passed"])
        limits = [len(text.encode(errors="surrogatepass")) + MARGIN for text in tests["outputs"]]
        outcome = self._run(job | {"inputs": tests["inputs"], "limits": limits})
        if isinstance(outcome, Undecided):
            return outcome
        found = outcome["outputs"]
        return float(len(found) == len(limits) and all(map(same_output, found, tests["outputs"])))

    def _run(self, job: dict[str, Any]) -> dict[str, Any] | Undecided:
        """Runs a job (program, tests and limits; see `python -m rftmega.sandbox`) in the sandbox
        and returns its outcome.

        Returns Undecided if the sandbox or the machine failed, or the tests cannot run outside the
        program's interpreter. Raises RewardError if the sandbox refuses to run.
        """
        outcome = run_sandboxed(job, job.get("seconds", SELF_TEST) + GRACE)
        if "refused" in outcome:
            raise RewardError(f"reward.code: {outcome['refused']}.")
        if "unsupported" in outcome:
            log.warning(
                "reward.code: tests can't be run outside the answer's interpreter: %s. docs/rewards.md has the rule; write them "
                "otherwise, or set reward.code_tests_inside=true.", outcome["unsupported"],
            )  # fmt: skip
            return Undecided()
        if "undecided" in outcome:
            log.warning("reward.code: a completion could not be judged: %s.", outcome["undecided"])
            return Undecided()
        lacks = outcome["lacks"]
        if self.namespaces is None and lacks["namespaces"]:
            missing = ", ".join(name for name, lacking in lacks.items() if lacking)
            log.warning(
                "reward.code: this machine gives the sandbox no %s; docs/rewards.md says what that means.",
                missing,
            )
        self.namespaces = not lacks["namespaces"]
        return outcome


def run_sandboxed(job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Runs a job (program, tests and limits) in `python -m rftmega.sandbox` and returns its
    outcome; {"undecided": reason} if a signal ended the sandbox.

    Raises RewardError if the sandbox returns nothing within `seconds`, or something that is not an
    outcome of this kind of job.
    """
    # An isolated environment as with -I, which would also drop the hash seed; but
    # scores must be the same on all ranks.
    command = [sys.executable, "-s", "-P", "-m", "rftmega.sandbox"]
    pipe = subprocess.PIPE
    tests = job.get("tests", "").encode(errors="surrogatepass")
    told = json.dumps({name: value for name, value in job.items() if name != "tests"}).encode()
    header = json.dumps({"size": len(told), "tests": len(tests)}).encode() + b"\n"
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        cwd="/",
        start_new_session=True,
    ) as process:
        said, late = b"", False
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(header + told + tests)
            process.stdin.flush()
            end = time.monotonic() + seconds
            said = _until_end(process.stdout.fileno(), end)
            late = time.monotonic() >= end
            process.stdin.close()  # only now: closing stdin makes the sandbox stop
        except BrokenPipeError:
            pass
        finally:
            if not said.endswith(b"\n") and (late or not _ends(process)):
                late = True
                os.killpg(process.pid, signal.SIGKILL)
    if not said.endswith(b"\n"):
        if not late and process.returncode < 0:
            return {
                "undecided": f"the sandbox was ended by {signal.Signals(-process.returncode).name}"
            }
        raise RewardError(
            f"reward.code: the sandbox gave no outcome within {seconds:g} s (exit status {process.returncode}). "
            f"Try `echo '{{}}' | {' '.join(command)}` by hand; it should complain about a missing key."
        )
    return _checked(said, job)


def _checked(said: bytes, job: dict[str, Any]) -> dict[str, Any]:
    """Parses `said`, the line that the sandbox wrote, and returns the outcome of `job`.

    Raises RewardError if `said` is not an outcome of this kind of job: a default would be an
    invented score.
    """
    wanted: tuple[str, type] = ("outputs", list) if "inputs" in job else ("passed", bool)
    try:
        outcome = json.loads(said)
        if "imports" in job:
            whole = "failed" in outcome and isinstance(outcome["failed"], str | None)
        else:
            whole = isinstance(outcome[wanted[0]], wanted[1]) if wanted[0] in outcome else False
        reasons = [
            name
            for name in ("refused", "unsupported", "undecided")
            if isinstance(outcome.get(name), str)
        ]
        if isinstance(outcome["lacks"], dict) and (whole or reasons):
            return dict(outcome)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise RewardError(f"reward.code: the sandbox said what is no outcome: {said[:200]!r}.")


def _ends(process: subprocess.Popen[bytes]) -> bool:
    """Waits up to GRACE seconds for a process that has closed its standard output to exit.

    Returns whether the process exited.
    """
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return False
    return True


def _until_end(descriptor: int, end: float) -> bytes:
    """Reads from a pipe up to a line end, the end of the pipe, or the time `end` (of
    time.monotonic), and returns the bytes. Their number needs no limit here: the sandbox limits the
    size of its outcome.
    """
    said = b""
    while not said.endswith(b"\n") and (left := end - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                break
            said += piece
    return said


def _environment() -> dict[str, str]:
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return one_thread | {
        "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1",
        "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
    }  # fmt: skip
