# ruff: noqa: E501
"""Tests and answer in two processes: honest answers pass as ever, and what an answer does to its
own interpreter is no use.
"""

import json

import pytest

from rftmega.rewards.code import CodePart
from rftmega.rewards.part import Answer, Undecided

READS_FRAMES = """
import gc, sys
def f(n):
    mark = "".join(["as", "sert f(7) == "])  # not a string of the answer's own
    def texts():
        frame = sys._getframe()
        while frame:
            yield from frame.f_locals.values()
            yield from frame.f_globals.values()
            frame = frame.f_back
        for held in gc.get_objects():
            if isinstance(held, dict):
                yield from list(held.values())
            elif isinstance(held, list | tuple):
                yield from list(held)
    for text in texts():
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        if isinstance(text, str) and mark in text and text.split(mark)[1][:2].isdigit():
            return int(text.split(mark)[1][:2])
    return 0
"""
FORGERIES = {
    "reads frames and objects": READS_FRAMES,
    "equals everything, with care": "class Yes:\n    def __eq__(self, other): return type(other) is int\n    __ne__ = None\n"
    "    def __sub__(self, other): return 0\ndef f(n):\n    return Yes()",
    "replaces builtins": "import builtins\nbuiltins.exec = builtins.compile = builtins.int = lambda *a: 0\ndef f(n):\n    return 0",
    "replaces AssertionError": "import builtins\nbuiltins.AssertionError = KeyboardInterrupt\nclass AssertionError(BaseException): pass\n"
    "def f(n):\n    return 0",
    "leaves": "import sys\ndef f(n):\n    sys.exit(0)",
    "leaves for good": "import os\ndef f(n):\n    os._exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "writes the verdict everywhere": "import os\ndef f(n):\n    for fd in range(3, 64):\n        try: os.write(fd, b'passed')\n"
    "        except OSError: pass\n    os._exit(0)",
    "replies what is no reply": "import os\ndef f(n):\n    for fd in range(3, 64):\n"
    '        try: os.write(fd, b\'{"value": ["named", ["os", "_exit"]], "given": [], "printed": ""}\\n\')\n'
    "        except OSError: pass\n    return 0",
    "reaches for the parent's memory": "import os\ndef f(n):\n    try: text = open(f'/proc/{os.getppid()}/environ').read()\n"
    "    except OSError: text = ''\n    return 49 if '49' in text else 0",
    "patches a library of the tests": "import math\nmath.isclose = lambda *a, **k: True\ndef f(n):\n    return 0",
    "is a sequence of what is asked": "class All:\n    def __contains__(self, x): return True\n    def __iter__(self): return iter([])\n"
    "def f(n):\n    return All()",
}
LABEL = "import math\nassert f(7) == 49\nassert math.isclose(f(7), 49)\nassert abs(f(7) - 49) < 1\nassert 49 in [f(7)]"
CLOSE = "import math\nassert math.isclose(f(7), 49)"
INSIDE = "assert 49 in f(7)"
LIARS = (
    "equals everything, with care",
    "patches a library of the tests",
    "is a sequence of what is asked",
)
CATCHES = "try:\n    f(7)\nexcept Exception:\n    pass\nassert f(7) in (49,)"


def test_the_answer_that_reads_frames_does_what_it_says_where_tests_are_inside() -> None:
    inside = CodePart(workers=1, seconds=30.0, memory_mib=512, inside=True)
    assert inside([Answer(READS_FRAMES, json.dumps({"tests": "assert f(7) == 49"}))]) == [1.0], (
        "or the case proves nothing"
    )


@pytest.mark.parametrize("namespaces", [None, False])
def test_forged_answers_score_nothing(namespaces: bool | None) -> None:
    part = CodePart(workers=2, seconds=30.0, memory_mib=512)
    part.namespaces = namespaces
    asked = {name: (code, CATCHES) for name, code in FORGERIES.items()}
    for label in (LABEL, CLOSE, INSIDE):
        asked |= {f"{name}: {label}": (FORGERIES[name], label) for name in LIARS}
    found = part([Answer(code, json.dumps({"tests": label})) for code, label in asked.values()])
    assert dict(zip(asked, found, strict=True)) == dict.fromkeys(asked, 0.0)


HONEST = {
    "plain values": (
        "def f(x): return x",
        "from decimal import Decimal\nfrom datetime import date\nheld = [1, 2.5, -10 ** 5000, 'é', None, True, b'x', (1, [2]), {3}, "
        "frozenset({4}), {'k': (1,), 2: []}, 1j, range(3), float('inf'), bytearray(b'y'), Decimal('1.1'), date(2020, 1, 2)]\n"
        "for x in held:\n    assert f(x) == x and type(f(x)) is type(x), x\nassert f(held) == held",
    ),
    "exceptions": (
        "class Mine(ValueError): pass\ndef f(x):\n    if x: raise Mine('why', 3)\n    return {}['k']",
        "try:\n    f(1)\nexcept Mine as error:\n    assert error.args == ('why', 3)\nelse:\n    assert False\n"
        "try:\n    f(1)\nexcept ValueError:\n    pass\ntry:\n    f(0)\nexcept KeyError as error:\n    assert error.args == ('k',)",
    ),
    "printed output": (
        "def f(x): print('hello', x)",
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f(3)\nassert out.getvalue() == 'hello 3\\n'",
    ),
    "lists that are sorted in place": (
        "def f(x, grid):\n    x.sort()\n    grid[0][0] = 9\n    grid.append([])",
        "a, grid = [3, 1, 2], [[1], [2]]\nrow = grid[0]\nf(a, grid=grid)\nassert a == [1, 2, 3] and grid == [[9], [2], []]",
    ),
    "classes": (
        "class Stack:\n    def __init__(self): self.held = []\n    def push(self, x): self.held.append(x)\n"
        "    def pop(self): return self.held.pop()\n    def __len__(self): return len(self.held)",
        "s = Stack()\ns.push(3)\ns.push((1, 2))\nassert len(s) == 2 and isinstance(s, Stack)\nassert s.pop() == (1, 2)\nassert s.held == [3]",
    ),
    "generators and iterators": (
        "def f(n):\n    yield from range(n)\ndef g(x): return map(str, x)",
        "assert list(f(3)) == [0, 1, 2] and next(iter(g([1]))) == '1'\nassert sorted(f(2)) == [0, 1]",
    ),
    "functions of Python's own": (
        "from collections import Counter\nimport math\ndef f(x, key): return sorted(x, key=key)\ndef g(x): return Counter(x)",
        "assert f(['bb', 'a'], len) == ['a', 'bb'] and math.isclose(1, 1.0)\nassert f(['B', 'a'], key=str.lower) == ['a', 'B']\n"
        "assert g('aab') == {'a': 2, 'b': 1}",
    ),
    "a candidate": (
        "def f(n):\n    return n + 1",
        "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
    ),
    "imported by name": (
        "LIMIT = 3\ndef f(): return LIMIT",
        "from answer import f, LIMIT\nassert f() == LIMIT == 3",
    ),
    "numbers of numpy": (
        "import numpy as np\ndef f(x): return np.cumsum(x)\ndef g(x): return np.int64(x)",
        "import numpy\nassert numpy.array_equal(f([1, 2]), numpy.array([1, 3])) and g(3) == 3",
    ),
}


def test_what_is_right_passes_and_its_negation_does_not() -> None:
    part = CodePart(workers=2, seconds=30.0, memory_mib=1024)
    right = part([Answer(code, json.dumps({"tests": tests})) for code, tests in HONEST.values()])
    assert dict(zip(HONEST, right, strict=True)) == dict.fromkeys(HONEST, 1.0)
    wrong = part(
        [
            Answer(code, json.dumps({"tests": f"{tests}\nassert 1 == 2"}))
            for code, tests in HONEST.values()
        ]
    )
    assert set(wrong) == {0.0}


NOT_FROM_OUTSIDE = {
    "a function of the tests'": ("def f(g): return g(3)", "assert f(lambda x: x + 1) == 4"),
    "an object of the tests'": ("def f(p): return p.x", "class P:\n    x = 4\nassert f(P()) == 4"),
    "a class of the tests' that the answer names": ("def f(): return Node().x", "class Node:\n    x = 4\nassert f() == 4"),
    "input": ("def f(): return input()", "import io, sys\nsys.stdin = io.StringIO('4\\n')\nassert f() == '4'"),
    "two objects of the answer's": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(): return P(1)", "assert f() == P(1)"),
    "a name of Python's own": ("def sum(x): return 4", "assert sum([4]) == 4"),
}  # fmt: skip


def test_tests_that_need_the_answers_interpreter_are_undecided_and_run_there_by_option() -> None:
    answers = [
        Answer(code, json.dumps({"tests": tests})) for code, tests in NOT_FROM_OUTSIDE.values()
    ]
    outside = CodePart(workers=2, seconds=30.0, memory_mib=512)
    found = {
        name: type(each) for name, each in zip(NOT_FROM_OUTSIDE, outside(answers), strict=True)
    }
    assert found == dict.fromkeys(NOT_FROM_OUTSIDE, Undecided)
    inside = CodePart(workers=2, seconds=30.0, memory_mib=512, inside=True)
    scores = dict(zip(NOT_FROM_OUTSIDE, inside(answers), strict=True))
    assert scores == dict.fromkeys(NOT_FROM_OUTSIDE, 1.0)


def test_an_answer_that_is_gone_raises_nothing_that_tests_may_catch() -> None:
    part = CodePart(workers=1, seconds=30.0, memory_mib=512)
    label = json.dumps({"tests": "try:\n    f(7)\nexcept BaseException:\n    pass"})
    assert part(
        [Answer(FORGERIES["leaves for good"], label), Answer("def f(n): return 1 / 0", label)]
    ) == [0.0, 1.0]
