"""Runs what CI runs: `python -m tests.in_two`. First the check of style and types, and beside it the
tests that no other test may be beside; then all other tests, in two workers of pytest at once.

The workers take one file of tests after the other, the longest first (`tests/durations.json`, which
`--record-durations` writes). Lines come as they are written, with the name of the part before them,
and at the end which tests failed and how many passed. A few that failed are run once more with nothing beside them: one that
passes then is named, since something in it depends on how busy the machine is, and does not fail the
run. The exit code is 0 where all passed.
"""

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

QUICK = "not ranks and not learning and not slurm and not gpu"
UNCACHED = "PYTHONDONTWRITEBYTECODE"  # every process would compile what it imports
MOST_REPEATED = 5  # tests; more than that is no accident
ALONE = (
    "tests/distributed/test_left_behind.py",  # it looks for processes that nobody waits for
    "tests/distributed/test_servers.py",  # and for shared memory that nobody maps
)
IN_TWO = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
TOGETHER = {"two": ["tests", *[f"--ignore={path}" for path in ALONE], *IN_TWO]}
CHECK = ("make", "--no-print-directory", "check")


class Part:
    """Part is a process whose lines are handed on, with what pytest counts in them."""

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self.counted: Counter[str] = Counter()
        self.failed: list[str] = []  # tests
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={name: value for name, value in os.environ.items() if name != UNCACHED}
            | {"OMP_WAIT_POLICY": "passive"},  # others need the core
        )
        self.thread = threading.Thread(target=self._hand_on)
        self.thread.start()

    def _hand_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stdout.write(f"{self.name}: {line}")
            sys.stdout.flush()
            if found := re.match(r"(?:FAILED|ERROR) (\S+::[^\n]*?)(?: - .*)?$", line):
                self.failed.append(found[1])
            if re.match(r"\d+ (passed|failed|error|skipped)", line):  # pytest's last line
                numbers = re.findall(r"(\d+) (passed|failed|error)", line)
                self.counted = Counter({kind: int(number) for number, kind in numbers})

    def end(self) -> int:
        """Waits for the end. Returns the exit code."""
        code = self.process.wait()
        self.thread.join()
        return abs(code)


def pytest_part(name: str, *chosen: str) -> Part:
    """Starts pytest with the `chosen` files and options."""
    return Part(name, [sys.executable, "-u", "-m", "pytest", "-q", "-m", QUICK, *chosen])


def run(parts: Sequence[Part]) -> int:
    """Waits for all of them. Returns the largest exit code; Ctrl-C reaches them as well."""
    try:
        return max([part.end() for part in parts])
    except KeyboardInterrupt:
        for part in parts:
            part.end()
        return 130


def main(*options: str) -> int:
    """Run all with further `options` of pytest. Returns the exit code."""
    check, *parts = [Part("check", CHECK), pytest_part("alone", *ALONE, *options)]
    code = run([check, *parts])
    if check.process.returncode:
        sys.stdout.write(f"`{' '.join(CHECK)}` failed, so that no more tests are run\n")
        return code
    if code != 130:
        parts += [pytest_part(name, *chosen, *options) for name, chosen in TOGETHER.items()]
        code = max(code, run(parts[1:]))
    passed = sum(part.counted["passed"] for part in parts)
    failed = [test for part in parts for test in part.failed]
    count = sum(part.counted["failed"] + part.counted["error"] for part in parts)
    if code == 1 and count == len(failed) <= MOST_REPEATED:
        again = pytest_part("again, alone", *failed)
        code = run([again])
        for test in set(failed) - set(again.failed) if code != 130 else ():
            sys.stdout.write(f"failed beside others and passed alone, so mend it: {test}\n")
        passed, failed, count = passed + again.counted["passed"], again.failed, len(again.failed)
    for test in failed:
        sys.stdout.write(f"failed: {test}\n")
    sys.stdout.write(f"{passed} passed, {count} failed\n")
    return code


if __name__ == "__main__":
    assert all(Path(path).is_file() for path in ALONE), "Run it in the project's folder."
    sys.exit(main(*sys.argv[1:]))
