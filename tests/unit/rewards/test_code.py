import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rftmega.core.errors import RewardError
from rftmega.rewards import code
from rftmega.rewards.code import CodePart, code_of, same_output
from rftmega.rewards.code_labels import complaint, read_tests
from rftmega.rewards.part import Answer

SQUARES = json.dumps({"tests": "assert f(2) == 4\nassert [f(n) for n in range(3)] == [0, 1, 4]"})
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
RIGHT = "def f(n):\n    return n * n\n"
PATIENT = 60.0  # seconds: nothing here takes long, but a machine may be busy


def at_its_end(statement: str) -> str:
    """A right answer that does something else besides, whatever comes of it."""
    return f"{RIGHT}try:\n    {statement}\nexcept BaseException:\n    pass\n"


@pytest.fixture(params=["namespaces", pytest.param("without", marks=pytest.mark.ranks)])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CodePart]:
    """Leaves nothing behind: no process, no memory.

    Once as this machine has it, once without namespaces.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setattr(
        code, "_environment", lambda plain=code._environment: plain() | {"MARK": mark}
    )
    part = CodePart(workers=2, seconds=PATIENT, memory_mib=512)
    part.namespaces = False if request.param == "without" else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield part
    assert marked(mark) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, (
        "KiB of this process"
    )


def marked(mark: str) -> list[str]:
    """Processes with `mark` in their environment."""

    def environment(pid: str) -> bytes:
        try:
            return Path("/proc", pid, "environ").read_bytes()
        except OSError:
            return b""

    return [
        pid for pid in os.listdir("/proc") if pid.isdigit() and mark.encode() in environment(pid)
    ]


def boxes() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rftmega-code-")}


EITHER_WAY = pytest.mark.parametrize("part", ["namespaces", "without"], indirect=True)


def score(part: CodePart, *responses: str, label: str = SQUARES) -> list[float]:
    return part([Answer(response, label) for response in responses])


def test_code_that_passes_all_tests_scores_and_other_code_does_not(part: CodePart) -> None:
    block = f"I think:\n```python\nnonsense(\n```\nno:\n```python\n{RIGHT}```\nDone."
    reads = "a, b = map(int, input().split())\nprint(a + b)"
    assert score(part, RIGHT, block, RIGHT.replace("*", "+"), "def f(n:", "", "Sorry.") == [
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]
    assert score(
        part, reads, f"{reads}\nraise SystemExit", "print(3)", f"{reads}\n1 / 0", label=SUMS
    ) == [1.0, 1.0, 0.0, 0.0]


CHEATS = {
    "leaves": "import sys\nsys.exit(0)",
    "leaves for good": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef f(n):\n    os._exit(0)",
    "says it passed": "print('passed', flush=True)\nprint('{\"passed\": true}', flush=True)\nraise SystemExit(0)",
    "equals everything": "class Yes:\n    __eq__ = lambda *each: True\ndef f(n):\n    return Yes()",
    "a number that equals everything": "class Yes(int):\n    __eq__ = lambda *each: True\ndef f(n):\n    return Yes(0)",
    "replaces the machinery": "import builtins, os, sys, ast\n"
    "builtins.AssertionError = builtins.exec = builtins.compile = ast.parse = lambda *each: None\ndef f(n):\n    return 0",
    "writes into every pipe": "import os\nfor fd in range(3, 128):\n    try:\n        os.write(fd, b'passed' * 11)\n"
    "    except OSError:\n        pass\nos._exit(0)",
    "reads every pipe and sends it back": "import os\nsaid = b''\nfor fd in range(3, 128):\n    try:\n"
    "        os.set_blocking(fd, False)\n        said += os.read(fd, 64)\n    except OSError:\n        pass\n"
    "for fd in range(3, 128):\n    try:\n        os.write(fd, said)\n    except OSError:\n        pass\nos._exit(0)",
    "reads its parents' files and sends them back": "import os\nsaid = b''\n"
    "for pid in {os.getppid(), *range(1, 9), 'self'}:\n"
    "    for name in ('environ', 'cmdline', 'fd/0', 'fd/3', 'fd/4', 'fd/5'):\n        try:\n"
    "            said += os.read(os.open(f'/proc/{pid}/{name}', os.O_RDONLY | os.O_NONBLOCK), 64)\n"
    "        except OSError:\n            pass\n"
    "for fd in range(3, 128):\n    try:\n        os.write(fd, said or b'?')\n    except OSError:\n        pass\nos._exit(0)",
}


def test_code_that_gets_round_the_tests_scores_nothing(part: CodePart) -> None:
    assert dict(zip(CHEATS, score(part, *CHEATS.values()), strict=True)) == dict.fromkeys(
        CHEATS, 0.0
    )


GREEDY = {
    "bombs with forks": "import os\nwhile True:\n    os.fork()",
    "takes 100 GB at once": "x = bytearray(100 << 30)",
    "takes 100 GB by and by": "x = [bytearray(1 << 20) for _ in range(100 << 10)]",
    "fills a file": "with open('big', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))",
    "starts threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=[99]).start()",
}


def test_greed_fails_and_leaves_nothing(part: CodePart) -> None:
    there = boxes()
    answers = [f"{RIGHT}{greed}" for greed in GREEDY.values()]
    assert dict(zip(GREEDY, score(part, *answers), strict=True)) == dict.fromkeys(GREEDY, 0.0)
    assert boxes() <= there


def test_what_never_ends_is_ended(part: CodePart) -> None:
    part.seconds = 0.3
    deaf = (
        "import signal, time\nfor n in set(range(1, 65)) - {9, 19, 32, 33}:\n    signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(9999)"
    )
    assert score(part, f"{RIGHT}while True: pass", deaf) == [0.0, 0.0]
    assert score(part, "input(); input()\nwhile True: pass", label=SUMS) == [0.0]


def test_a_gigabyte_of_output_costs_no_memory(part: CodePart) -> None:
    flood = "import os\nfor _ in range(1000):\n    os.write(1, bytes(1 << 20))\n"
    assert score(part, RIGHT + flood) == [1.0], "nobody reads what it prints"
    assert score(part, flood, label=SUMS) == [0.0]


@EITHER_WAY
def test_a_daemon_dies_with_the_answer_that_left_it(part: CodePart) -> None:
    daemon = at_its_end(
        "import os, time\n    if not os.fork():\n        os.setsid()\n        os.fork() or time.sleep(9999)\n        os._exit(0)"
    )
    talking = (
        "import os, time\nprint(sum(map(int, input().split())), flush=True)\n"
        "if not os.fork():\n    os.setsid()\n    time.sleep(9999)"
    )
    assert score(part, daemon) == [1.0]
    assert score(part, talking, label=SUMS) == [1.0], (
        "the program ended well; what it left behind didn't hold it up"
    )


@pytest.mark.parametrize("namespaces", [None, False])
def test_an_answer_dies_with_the_trainer_that_asked_for_it(namespaces: bool | None) -> None:
    mark, there = uuid.uuid4().hex, boxes()
    endless = "import os\nif not os.fork():\n    os.setsid()\nwhile True:\n    pass"
    trainer = (
        "from rftmega.rewards import code, part\nplain = code._environment()\n"
        f"code._environment = lambda: plain | dict(MARK={mark!r})\n"
        f"scores = code.CodePart(workers=1, seconds=999.0, memory_mib=512)\nscores.namespaces = {namespaces}\n"
        f"scores([part.Answer({endless!r}, {SQUARES!r})])"
    )
    with subprocess.Popen([sys.executable, "-c", trainer], cwd=code.ROOT) as process:
        # the supervisor, the one between, the answer and its daemon
        until(lambda: len(marked(mark)) >= 4)
        process.kill()
    until(lambda: not marked(mark) and boxes() <= there)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it never does"
        time.sleep(0.01)


@EITHER_WAY
def test_there_is_no_network(part: CodePart) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = (
            b"\2\0" + server.getsockname()[1].to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
        )
        # through libc: Python's own module may not be readable for the user that an answer is
        connected = f"libc.connect(libc.socket(2, 1, 0), {address}, 16) == 0"
        connects = f"import ctypes\nlibc = ctypes.CDLL(None)\nassert {connected}\n{RIGHT}"
        assert score(part, connects) == [0.0]
        with pytest.raises(BlockingIOError):
            server.accept()


CONFINED = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
given = ctypes.c_int()

def refused(path):
    try:
        open(path).close()
    except OSError:
        return True
    return False

def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

def is_python(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}") in PREFIXES and not libc.faccessat(descriptor, b"lib", 4, 0)

held = [descriptor for descriptor in range(3, 1024) if is_open(descriptor)]
folders = [descriptor for descriptor in held if os.path.exists("/proc/self/fd") and is_python(descriptor)]
assert len(held) - len(folders) <= PIPES
assert os.fstat(2).st_rdev == os.stat("/dev/null").st_rdev
assert {os.environ["HOME"], os.environ["TMPDIR"], os.getcwd()} == {os.getcwd()}
assert refused("/etc/passwd") and refused(MODULE)
assert (os.getuid() >= 1_900_000_000) is ROOT
for limit, least in ((resource.RLIMIT_AS, 512 << 20), (resource.RLIMIT_CPU, 61), (resource.RLIMIT_FSIZE, 64 << 20),
                     (resource.RLIMIT_NOFILE, 128), (resource.RLIMIT_CORE, 0)):
    assert max(resource.getrlimit(limit)) <= least
assert libc.prctl(3, 0, 0, 0, 0) == 0, "others of the same user may not trace it: PR_GET_DUMPABLE"
assert libc.prctl(2, ctypes.byref(given), 0, 0, 0) == 0 and given.value == 9, "PR_GET_PDEATHSIG"
assert libc.prctl(39, 0, 0, 0, 0) == 1, "PR_GET_NO_NEW_PRIVS"
assert libc.prctl(21, 0, 0, 0, 0) == 2, "PR_GET_SECCOMP: a filter"
capabilities = (ctypes.c_uint32 * 6)(*[1] * 6)
assert libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), capabilities) == 0 and not any(capabilities)
"""


@EITHER_WAY
@pytest.mark.parametrize(("who", "pipes"), [("answer", 2), ("checker", 3), ("both in one", 2)])
def test_an_answer_finds_itself_confined_in_every_way_at_once(
    part: CodePart, who: str, pipes: int
) -> None:
    """Also in a run that keeps its files to itself."""
    prefixes = [os.path.realpath(each) for each in (sys.prefix, sys.base_prefix)]
    seen = CONFINED.replace("MODULE", repr(code.__file__)).replace("ROOT", repr(os.getuid() == 0))
    seen = seen.replace("PREFIXES", repr(prefixes)).replace("PIPES", str(pipes))
    part.inside = who == "both in one"
    response, label = (
        (seen + RIGHT, SQUARES) if who == "answer" else (RIGHT, json.dumps({"tests": seen}))
    )
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            assert score(part, response, label=label) == [1.0], oct(umask)
        finally:
            os.umask(before)


def test_the_folder_may_be_deleted_and_whatever_permissions_are_left(part: CodePart) -> None:
    there = boxes()
    deletes = at_its_end("import os, shutil\n    shutil.rmtree(os.getcwd(), ignore_errors=True)")
    locks = at_its_end(
        "import os\n    os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)"
    )
    assert score(part, deletes, locks) == [1.0, 1.0]
    assert boxes() <= there


def test_nothing_is_written_elsewhere(part: CodePart, tmp_path: Path) -> None:
    name = f"left-{uuid.uuid4().hex}"
    folders = [
        "/",
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        str(Path.home()),
        str(tmp_path),
        str(code.ROOT),
        os.path.realpath(sys.prefix),
    ]
    tmp_path.chmod(0o777)
    tries = at_its_end(
        f"for folder in {folders}:\n        try: open(folder + '/{name}', 'w').close()\n        except OSError: pass"
    )
    assert score(part, tries) == [1.0]
    left = [folder for folder in folders if Path(folder, name).exists()]
    for folder in left:
        Path(folder, name).unlink()
    assert left == []


@EITHER_WAY
def test_other_processes_are_out_of_reach(part: CodePart) -> None:
    kills = at_its_end(
        f"import os\n    for pid in ({os.getpid()}, os.getppid() or 1, -1):\n        os.kill(pid, 9)"
    )
    assert score(part, kills)[0] in (0.0, 1.0)
    assert score(part, RIGHT) == [1.0]


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("x = 1", "not JSON"),
        ("[]", "neither"),
        ('{"tests": 1}', "neither"),
        ('{"tests": "assert ("}', "not Python"),
        ('{"inputs": [], "outputs": []}', "neither"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "neither"),
        ('{"inputs": [1], "outputs": [1]}', "neither"),
        ('"x"', "not JSON"),
        ('{"input": "1", "output": "1"}', "neither.*has the keys 'input', 'output'"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', r"1 input\(s\) and 2 output\(s\)"),
        (
            '{"inputs": [[1]], "outputs": [1]}',
            r"input 0 is \[1\], not text; arguments need fn_name",
        ),
        (
            '{"fn_name": "f", "inputs": [1], "outputs": [1]}',
            "input 0 is 1, not a list of arguments",
        ),
        ('{"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}', "input 0 is to be JSON.*'x'"),
        ('{"fn_name": "f", "inputs": ["1"], "outputs": ["x"]}', "output 0 is to be JSON.*'x'"),
        (
            '{"fn_name": "f()", "inputs": [[]], "outputs": [1]}',
            r"fn_name='f\(\)' is no name of a function",
        ),
        ('[{"input": "1"}]', "test 0 lacks input or output"),
        (
            '[{"input": "1", "output": "1", "testtype": "functional"}]',
            "test 0 is functional, but names no function",
        ),
        (
            '[{"input": "1", "output": "1", "testtype": "magic"}]',
            "test 0 has the unknown testtype 'magic'",
        ),
        (
            '[{"input": "1", "output": "1"}, {"input": "1", "output": "1", "fn_name": "f"}]',
            r"different functions or kinds \(f, standard input\)",
        ),
        ("[" * 5000, "not JSON"),
    ],
)
def test_a_label_that_holds_no_tests_is_named_and_no_score(label: str, why: str) -> None:
    assert re.search(why, complaint(label) or "")
    with pytest.raises(RewardError, match=why):
        CodePart(workers=1, seconds=PATIENT, memory_mib=512)([Answer(RIGHT, label)])


def test_the_last_python_block_is_the_code() -> None:
    assert complaint(SQUARES) is complaint(SUMS) is None
    assert code_of("```python\na\n```\n```Python\nb\n```\n```\nc\n```") == "b\n"
    assert code_of("```\na\n```\nand\n```text\nb\n```") == "a\n"
    assert code_of("```c\na\n```\nis\n``` \nb\n```\n```\nc") == "b\n"
    assert code_of("```c\na\n```") == "```c\na\n```"
    assert code_of("x = 1") == "x = 1"


def test_labels_are_read_in_the_forms_that_data_sets_have() -> None:
    stdin = {"inputs": ["1\n2", "3"], "outputs": ["3", "3"]}
    apps = {"inputs": [["1", "2"], "3"], "outputs": [["3"], "3"], "fn_name": None}
    records = [
        {"input": a, "output": b, "testtype": "stdin"} for a, b in zip(*stdin.values(), strict=True)
    ]
    for label in (stdin, apps, records, {"test_cases": records}, json.dumps(stdin)):
        assert read_tests(json.dumps(label)) == stdin
    calls = {"name": "f", "calls": [[[1, [2]], True]], "wrapped": False}
    metadata = {"func_name": "f"}
    lines = {"input": "1\n[2]\n", "output": "true", "testtype": "functional", "metadata": metadata}
    for label in (
        {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [True]},
        {"fn_name": "f", "inputs": ["1\n[2]"], "outputs": ["true"]},
        [{"type": "function_call", "fn_name": "f", "input": [1, [2]], "output": True}],
        [lines],
        [lines | {"metadata": json.dumps(metadata)}],
    ):
        assert read_tests(json.dumps(label)) == {"calls": calls}
    wrapped = {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[True]]}
    assert read_tests(json.dumps(wrapped)) == {
        "calls": {"name": "f", "calls": [[[1, [2]], [True]]], "wrapped": True}
    }


def label_of(*calls: tuple[list[object], object]) -> str:
    inputs, outputs = zip(*calls, strict=True)
    return json.dumps({"fn_name": "f", "inputs": inputs, "outputs": outputs})


PAIRS = label_of(([[3, 1], 2], [3, 5]), ([[], 0], [0, 0]))
METHOD = "class Solution:\n    def f(self, x: List[int], y: Optional[int]) -> Tuple[int, int]:\n"
EXPECTED = {
    "a function": ("def f(x, y): return [max(x, default=0), y + 3 if y else 0]", PAIRS, 1.0),
    "a method": (f"{METHOD}        return max(x, default=0), y + 3 if y else 0", PAIRS, 1.0),
    "from the future": ("from __future__ import annotations\ndef f(x): return x", label_of(([1], 1)), 1.0),
    "the first is right": ("def f(x, y): return [3, 5]", PAIRS, 0.0),
    "another name": ("def g(x, y): return [3, 5]", PAIRS, 0.0),
    "raises": ("def f(x): raise ValueError", label_of(([1], None)), 0.0),
    "exits": ("import os\ndef f(x): os._exit(0)", label_of(([1], 1)), 0.0),
    "a float": ("def f(x): return x * 3", label_of(([0.1], 0.3), ([2], 6)), 1.0),
    "text is no number": ("def f(x): return '1'", label_of(([1], 1)), 0.0),
    "too long": ("def f(x): return [1, 2, 3]", label_of(([1], [1, 2])), 0.0),
    "one element": ("def f(x): return x", label_of(([1], [1]), ([2], [2])), 1.0),
    "a list of one": ("def f(x): return [x]", label_of(([1], [1]), ([2], [2])), 1.0),
    "now so, now so": ("def f(x): return x if x == 1 else [x]", label_of(([1], [1]), ([2], [2])), 0.0),
    "not all of one": ("def f(x): return 1", label_of(([1], [1]), ([2], 1)), 0.0),
    "keys": ("def f(x): return {k + 1: v for k, v in x.items()}", label_of(([{"1": 2}], {"2": 2})), 1.0),
    "equals everything": ("class Yes(int):\n    __eq__ = lambda *a: True\ndef f(x): return Yes(0)", label_of(([1], 1)), 0.0),
    "an object": ("class Yes:\n    __eq__ = lambda *a: True\ndef f(x): return Yes()", label_of(([1], 1)), 0.0),
}  # fmt: skip


def test_functions_are_called_with_the_labels_arguments(part: CodePart) -> None:
    found = part([Answer(code, label) for code, label, _ in EXPECTED.values()])
    wanted = [expected for *_, expected in EXPECTED.values()]
    assert dict(zip(EXPECTED, found, strict=True)) == dict(zip(EXPECTED, wanted, strict=True))


def test_outputs_agree_up_to_white_space_at_the_ends_of_lines() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert not same_output("1  2\n3", "1 2\n3")
    assert not same_output("\n1", "1")
