"""Programs, judged by tests. What the sandbox promises, and what it doesn't, is in docs/rewards.md.

Not promised: the asserts of "tests" run in the same interpreter as the answer, as they must to call it. An answer that was
written against this very runner, that walks frames, patches a library which the tests use or makes objects that lie about
themselves with care, can pass them. Programs with inputs and outputs are compared outside, where an answer can't reach.
"""

import ast
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

from rftmega.errors import RewardError
from rftmega.rewards.part import Answer

log = logging.getLogger(__name__)
_BLOCK = re.compile(r"```(?:python|py)3?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
ROOT = Path(__file__).parents[2]
GRACE = 60.0  # seconds for the sandbox itself to start and end, on a busy machine
MARGIN = 4096  # bytes that an output may be longer than the expected one, in white space


def code_of(response: str) -> str:
    """The last closed ```python block, or else the whole response."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


def read_tests(label: str) -> dict[str, Any]:
    """{"tests": source of asserts} or {"inputs": [...], "outputs": [...]}. Raises ValueError that says what it is instead."""
    try:
        held = json.loads(label)
    except ValueError as error:
        raise ValueError(f"the label is not JSON ({error})") from None
    if isinstance(held, dict) and isinstance(held.get("tests"), str):
        try:
            ast.parse(held["tests"])
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the label's tests are not Python ({error})") from None
        return {"tests": held["tests"]}
    if isinstance(held, dict):
        inputs, outputs = held.get("inputs", 0), held.get("outputs", 0)
        if _texts(inputs) and _texts(outputs) and len(inputs) == len(outputs) > 0:
            return {"inputs": inputs, "outputs": outputs}
    raise ValueError('the label is neither {"tests": text} nor {"inputs": [text, ...], "outputs": [as many]}')


def _texts(held: Any) -> bool:
    return isinstance(held, list) and all(isinstance(text, str) for text in held)


def complaint(label: str) -> str | None:
    """Why this label can't be one; None where it can."""
    try:
        read_tests(label)
    except ValueError as error:
        return str(error)
    return None


def same_output(found: str, expected: str) -> bool:
    """Whether lines agree, white space at their ends and empty lines at the end aside."""
    return _lines(found) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


class CodePart:
    """Scores `workers` answers at a time, whichever threads ask."""

    def __init__(self, *, workers: int, seconds: float, memory_mib: int):
        self.seconds, self.memory = seconds, memory_mib << 20
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="code-reward")
        self.namespaces: bool | None = None  # whether they can be had here; None: nobody has looked
        self.tested, self.testing = False, threading.Lock()

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """1 where the answer's code passes all tests. Raises RewardError where a label holds none, or without any sandbox."""
        self.test()
        return list(self.threads.map(self._score, answers))

    def test(self) -> None:
        """Raises RewardError where answers could not import in the sandbox what answers import. Looks once."""
        with self.testing:
            if not self.tested and (failed := self._run({"namespaces": self.namespaces, "imports": True})["failed"]):
                raise RewardError(f"reward.code: {failed}.")
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
        job = {"answer": code, "seconds": self.seconds, "memory": self.memory, "namespaces": self.namespaces}
        if "tests" in tests:
            return float(self._run(job | tests)["passed"])
        limits = [len(text.encode(errors="surrogatepass")) + MARGIN for text in tests["outputs"]]
        found = self._run(job | {"inputs": tests["inputs"], "limits": limits})["outputs"]
        return float(len(found) == len(limits) and all(map(same_output, found, tests["outputs"])))

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        outcome = run_sandboxed(job, self.seconds + GRACE)
        if "refused" in outcome:
            raise RewardError(f"reward.code: {outcome['refused']}.")
        lacks = outcome["lacks"]
        if self.namespaces is None and lacks["namespaces"]:
            missing = ", ".join(name for name, lacking in lacks.items() if lacking)
            log.warning("reward.code: this machine gives the sandbox no %s; docs/rewards.md says what that means.", missing)
        self.namespaces = not lacks["namespaces"]
        return outcome


def run_sandboxed(job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What `python -m rftmega.sandbox` says of a job. Raises RewardError where it says nothing within `seconds`."""
    # As -I would have it, an environment of our own; but -I also forgets the seed of hashes, and ranks must agree on scores.
    command = [sys.executable, "-s", "-P", "-m", "rftmega.sandbox"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=_environment(), cwd="/", start_new_session=True
    ) as process:
        said = b""
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            said = _until_end(process.stdout.fileno(), time.monotonic() + seconds)
            process.stdin.close()  # only now: its end is the sandbox's order to stop
        except BrokenPipeError:
            pass
        finally:
            if not said.endswith(b"\n"):
                os.killpg(process.pid, signal.SIGKILL)
    if not said.endswith(b"\n"):
        raise RewardError(
            f"reward.code: the sandbox gave no outcome within {seconds:g} s (exit status {process.returncode}). "
            f"Try `echo '{{}}' | {' '.join(command)}` by hand; it should complain about a missing key."
        )
    outcome = json.loads(said)
    assert isinstance(outcome, dict)
    return outcome


def _until_end(descriptor: int, end: float) -> bytes:
    """The sandbox bounds what it says by what the job allows."""
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
