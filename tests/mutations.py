"""Plants one bug at a time and runs the test that is to see it: `make mutations`, or

    python -m tests.mutations                    # all of tests/mutations.jsonl; writes runs/mutations.json
    python -m tests.mutations surrogates gae     # those whose file, test or note has one of these words

A line of tests/mutations.jsonl is a bug: `file`, `old` (text that is there once) and `new`, the
`test` that must fail, and a `note` of what goes wrong. Bugs are planted in a copy of the tree, and
the tests must pass without them. There is none that takes a limit of the sandbox away: such a one
could bring the machine down.
"""

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".jsonl")
LIMIT = 300  # seconds of one test
CONTEXT = multiprocessing.get_context("forkserver")  # imports take longer than most tests
FAILED = 1  # pytest's exit status: tests were run, and some failed
# of a process that read memory which the bug had freed
CRASHED = (-signal.SIGSEGV, -signal.SIGABRT)


class Mutation(NamedTuple):
    """One bug."""

    file: str
    old: str
    new: str
    test: str
    note: str

    @property
    def line(self) -> int:
        """Where it is, counted from 1."""
        return (ROOT / self.file).read_text().partition(self.old)[0].count("\n") + 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.note}"


class Outcome(NamedTuple):
    """What came of a bug."""

    mutation: Mutation
    killed: bool
    why: str  # it survived; empty: it did not
    seconds: float


def mutations() -> list[Mutation]:
    return [Mutation(**json.loads(line)) for line in LIST.read_text().splitlines()]


def problems(mutation: Mutation) -> list[str]:
    """Why a line of the list is no bug that can be planted."""
    path = ROOT / mutation.file
    if not path.is_file():
        return [f"{mutation.file} is not there"]
    text = path.read_text()
    found = []
    if text.count(mutation.old) != 1:
        found.append(
            f"{mutation.file} has the old text {text.count(mutation.old)} times, not once: {mutation.old!r}"
        )
    if mutation.old == mutation.new:
        found.append(f"{mutation.file}: old and new are the same: {mutation.old!r}")
    if path.suffix == ".py" and not found:
        try:
            ast.parse(text.replace(mutation.old, mutation.new))
        except SyntaxError as error:
            found.append(f"{mutation.file}: with {mutation.new!r} it is no Python: {error}")
    file, _, name = mutation.test.partition("::")
    test = ROOT / file
    function = name.partition("[")[0]
    if not test.is_file() or (function and f"def {function}(" not in test.read_text()):
        found.append(f"there is no test {mutation.test}")
    return found


def copied(folder: Path) -> Path:
    """A copy of the tree, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def tested(tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's exit status (None: it took too long), and what it said."""
    said = tree.with_suffix(".said")
    CONTEXT.set_forkserver_preload(["tests.third_party"])
    process = CONTEXT.Process(target=_pytest, args=(tree, list(tests), said, dict(os.environ)))
    process.start()
    process.join(LIMIT * len(tests))
    if process.exitcode is None:
        os.killpg(process.ident, signal.SIGKILL)
        process.join()
        return None, ""
    return process.exitcode, said.read_text(errors="replace")


def _pytest(tree: Path, tests: list[str], said: Path, environment: dict[str, str]) -> None:
    """Be a process of pytest in the copy, with the copy's modules."""
    os.setsid()
    written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(written, number)
    os.environ |= environment | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    os.chdir(tree)
    sys.path[:] = [str(tree), *(each for each in sys.path if Path(each).absolute() != ROOT)]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("rftmega", "tests"):
            del sys.modules[name]
    importlib.invalidate_caches()
    import pytest

    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    os._exit(int(status))  # no thread that a bug left running keeps it


def planted(tree: Path, mutation: Mutation) -> Outcome:
    """Plants the bug in the copy, runs its test, and takes the bug out again."""
    path = tree / mutation.file
    plain = path.read_text()
    begin = time.monotonic()
    path.write_text(plain.replace(mutation.old, mutation.new))
    try:
        status, said = tested(tree, [mutation.test])
    finally:
        path.write_text(plain)
    seconds = time.monotonic() - begin
    if status == FAILED or status in CRASHED:
        return Outcome(mutation, True, "", seconds)
    last = said.strip().splitlines()[-1:] or [""]
    why = f"pytest ended with {status}: {last[0]}"
    if status is None:
        why = f"no answer in {LIMIT} s"
    if status == 0:
        why = "the test passes"
    return Outcome(mutation, False, why, seconds)


def chosen_of(words: Sequence[str]) -> list[Mutation]:
    return [
        each for each in mutations() if not words or any(word in " ".join(each) for word in words)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="only bugs whose file, test or note has one of them"
    )
    parser.add_argument("--jobs", type=int, default=2, help="tests that run side by side (2)")
    parser.add_argument(
        "--passed",
        action="store_true",
        help="the tests passed a moment ago: don't run them without a bug first",
    )
    given = parser.parse_args()
    chosen = chosen_of(given.words)
    wrong = [problem for each in chosen for problem in problems(each)]
    if wrong or not chosen:
        sys.stderr.write("\n".join(wrong or ["no bug has these words"]) + "\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        trees = [copied(Path(folder) / f"tree{number}") for number in range(given.jobs)]
        status, said = (
            (0, "") if given.passed else tested(trees[0], sorted({each.test for each in chosen}))
        )
        if status != 0:
            sys.stderr.write(f"The tests fail without any bug:\n{said}\n")
            return 2
        outcomes = run(trees, chosen)
    survivors = [each for each in outcomes if not each.killed]
    print(
        f"{len(outcomes) - len(survivors)} of {len(outcomes)} bugs were seen, {len(survivors)} survived"
    )
    return int(bool(survivors))


def run(trees: Sequence[Path], chosen: Sequence[Mutation]) -> list[Outcome]:
    """All of them, as many side by side as there are copies of the tree.

    What is known is written down at once.
    """
    free, outcomes = list(trees), list[Outcome]()

    def one(mutation: Mutation) -> Outcome:
        tree = free.pop()
        try:
            return planted(tree, mutation)
        finally:
            free.append(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for outcome in tqdm(pool.map(one, chosen), total=len(chosen), unit="bug"):
            outcomes.append(outcome)
            written(outcomes)
            if not outcome.killed:
                sys.stderr.write(
                    f"SURVIVED ({outcome.why}) {outcome.mutation}: {outcome.mutation.test}\n"
                )
    return outcomes


def written(outcomes: Sequence[Outcome]) -> None:
    """runs/mutations.json: what came of each bug."""
    target = ROOT / "runs/mutations.json"
    target.parent.mkdir(exist_ok=True)
    rows = []
    for each in outcomes:
        found = {
            "line": each.mutation.line,
            "killed": each.killed,
            "why": each.why,
            "seconds": round(each.seconds, 1),
        }
        rows.append(each.mutation._asdict() | found)
    target.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
