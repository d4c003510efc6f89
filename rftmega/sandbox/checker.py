"""The checker's process: runs the tests of a task, in which the names that the answer (the program
under test) defines refer to stand-ins for objects in the answer's process.
"""

import ast
import builtins
import importlib
import io
import json
import os
import sys
import types
from typing import Any, NoReturn

from rftmega.sandbox import calls, json_values, program

PASSED = b"passed"
UNSUPPORTED = b"unsupported: "
LONGEST = 64 << 20  # bytes of one reply
# Modules that an answer may add to the tests' names: nothing in them can end or pass a
# test.
MODULES = (
    "math", "cmath", "itertools", "functools", "collections", "re", "json", "string", "random", "heapq", "bisect",
    "datetime", "decimal", "fractions", "statistics", "copy", "typing", "numpy",
)  # fmt: skip


class Checker:
    """Checker sends operations on the answer's objects to the answer's process, one JSON line at a
    time, and writes the verdict on the tests to a pipe that no other process can write to.
    """

    def __init__(self, requests: int, replies: int, verdict: int):
        self.asked = io.BufferedWriter(io.FileIO(requests, "wb"))
        self.told = io.BufferedReader(io.FileIO(replies, "rb"))
        self.verdict = verdict
        self.input, self.stdin = builtins.input, sys.stdin
        self.space: dict[str, Any] = {}
        self.stand_ins: dict[int, Any] = {}

    def read(self) -> Any:
        line = self.told.readline(LONGEST)
        if not line.endswith(b"\n"):
            # the answer is gone: no test may go on as if an exception had been asked for
            os._exit(1)
        try:
            return json.loads(line)
        except (ValueError, RecursionError, MemoryError):
            os._exit(1)

    def unsupported(self, why: str) -> NoReturn:
        os.write(self.verdict, UNSUPPORTED + why.encode()[:200])
        os._exit(1)

    def ask(self, operation: str, *given: Any, **named: Any) -> Any:
        """Performs an operation on objects in the answer's process and returns its result.

        `operation`: a key of `served.OPERATIONS`, such as "call"; `given`, `named`: its arguments.
        Raises the exception that the operation raised in that process.
        """
        if builtins.input is not self.input or sys.stdin is not self.stdin:
            self.unsupported("they give the answer an input of their own (sys.stdin)")
        request = {
            "do": operation,
            "given": [self.encode(each) for each in given],
            "named": self.encode(named),
        }
        try:
            self.asked.write(json.dumps(request).encode() + b"\n")
            self.asked.flush()
        except BrokenPipeError:
            os._exit(1)
        told = self.read()
        try:
            printed, raised = str(told["printed"]), told.get("raised")
            after = [self.decode(each) for each in told["given"]]
            value = self.decode(told["value"]) if raised is None else self.exception(told)
        except BaseException:
            # a malformed reply, not an exception of the answer that a test may expect
            os._exit(1)
        sys.stdout.write(printed)
        for mine, theirs in zip((*given, *named.values()), after, strict=False):
            change(mine, theirs)
        if raised is not None:
            raise value
        return value

    def exception(self, told: dict[str, Any]) -> BaseException:
        if told["name"] and told["name"] in self.space:
            self.unsupported(f"they define {told['name']}, which the answer uses")
        kind = self.stand_ins.get(told["object"])
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = exception_type(told["raised"])
        error = kind.__new__(kind, *told["args"])
        error.args = tuple(told["args"])
        assert isinstance(error, BaseException)
        return error

    def encode(self, value: Any) -> Any:
        return json_values.encode(value, self.hand_over)

    def hand_over(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            return ["object", value._handle]
        for handle, held in self.stand_ins.items():
            if held is value:
                return ["object", handle]
        holder = (
            value if getattr(value, "__module__", None) else getattr(value, "__objclass__", None)
        )
        module, name = getattr(holder, "__module__", None), getattr(value, "__qualname__", "")
        if module not in sys.stdlib_module_names or not name or named(module, name) is not value:
            self.unsupported(f"they give the answer a {type(value).__qualname__}")
        return ["named", [module, name]]

    def decode(self, held: Any) -> Any:
        return json_values.decode(held, self.take)

    def take(self, tag: str, rest: Any) -> Any:
        if tag == "module":
            return importlib.import_module(rest) if rest in MODULES else types.ModuleType(str(rest))
        if tag != "object":
            raise ValueError(f"not a value: {tag!r:.100}")
        handle, module, name, bases = rest
        if handle not in self.stand_ins:
            made: Any = StandIn(self, int(handle), str(module), str(name))
            if bases:
                made = type(str(name), (exception_type(bases),), {"__module__": "answer"})
            self.stand_ins[handle] = made
        return self.stand_ins[handle]


def named(module: str, path: str) -> Any:
    """Returns the attribute of a Python module at a dotted path; None if there is none."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def exception_type(names: list[str]) -> type[BaseException]:
    """Returns the first built-in exception among `names`, the names of an exception's base classes;
    Exception if there is none.
    """
    for name in names:
        found = getattr(builtins, str(name), None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return Exception


def change(mine: Any, theirs: Any) -> None:
    """Updates `mine`, a container that was passed to the answer, in place such that it equals
    `theirs`, the container in the answer's process after the call.
    """
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list) and len(mine) == len(theirs):
        for at, (old, new) in enumerate(zip(mine, theirs, strict=True)):
            if type(old) is type(new) and isinstance(old, list | dict | set):
                change(old, new)
            else:
                mine[at] = new
    elif isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict):
        for key in [key for key in mine if key not in theirs]:
            del mine[key]
        for key, new in theirs.items():
            if (
                key in mine
                and isinstance(mine[key], list | dict | set)
                and type(mine[key]) is type(new)
            ):
                change(mine[key], new)
            else:
                mine[key] = new
    elif isinstance(mine, set):
        mine.intersection_update(theirs)
        mine.update(theirs)


class StandIn:
    """StandIn represents, in the process that runs the tests, an object of the answer's process
    that is not a plain value (number, text, container).

    A StandIn never equals a plain value: the object's own comparison is never called.
    """

    _checker: Checker
    _handle: int

    def __init__(self, checker: Checker, handle: int, module: str, name: str):
        vars(self).update(_checker=checker, _handle=handle, _module=module, _name=name)

    def __getattr__(self, name: str) -> Any:
        return self._checker.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._checker.ask("setattr", self, name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._checker.ask("call", self, *given, **named)

    def __getitem__(self, key: Any) -> Any:
        return self._checker.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._checker.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._checker.ask("delitem", self, key)

    def __iter__(self) -> Any:
        return self._checker.ask("iter", self)

    def __next__(self) -> Any:
        return self._checker.ask("next", self)

    def __len__(self) -> int:
        return int(self._checker.ask("len", self))

    def __bool__(self) -> bool:
        return self._checker.ask("bool", self) is True

    def __str__(self) -> str:
        return str(self._checker.ask("str", self))

    def __repr__(self) -> str:
        return str(self._checker.ask("repr", self))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, StandIn) and self._checker.ask("isinstance", value, self) is True

    def __hash__(self) -> int:
        return hash(self._handle)

    def _both(self, other: Any) -> Any:
        """Implements comparison and arithmetic with `other`: ends the tests as unsupported if an
        object of the answer could decide the outcome, otherwise returns NotImplemented, so that
        Python uses the other operand's method.
        """
        if isinstance(other, StandIn):
            self._checker.unsupported("they compare or combine objects of the answer's own classes")
        if vars(self)["_module"] not in ("answer", "builtins"):
            self._checker.unsupported(
                f"they compare a {vars(self)['_module']}.{vars(self)['_name']}"
            )
        return NotImplemented

    def __eq__(self, other: object) -> Any:
        return True if other is self else self._both(other)

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __sub__ = __mul__ = __truediv__ = __mod__ = (
        __and__
    ) = __or__ = _both


def check(tests: str, requests: int, replies: int, verdict: int, *, are_calls: bool) -> int:
    """Runs the tests with the answer's names and writes PASSED to the pipe `verdict` if they run to
    completion. Returns the exit status 0.

    `requests`, `replies`: pipes to and from the answer's process; `are_calls`: the tests are calls
    as JSON, see `calls.check_calls`, not source text.
    """
    checker = Checker(requests, replies, verdict)
    names = {name: checker.decode(value) for name, value in checker.read().items()}
    if are_calls:
        calls.check_calls(json.loads(tests), names)
    else:
        run_source(checker, tests, names)
    os.write(verdict, PASSED)
    return 0


def run_source(checker: Checker, tests: str, names: dict[str, Any]) -> None:
    """Runs the source text `tests` with the answer's names. Exceptions of the tests are not caught."""
    module = types.ModuleType("answer")
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    for name, value in names.items():
        genuine = isinstance(value, types.ModuleType)
        if hasattr(builtins, name) and name in used:
            checker.unsupported(
                f"they use {name}, a name of Python's own that the answer defines anew"
            )
        if not name.startswith("__") and (genuine or name not in sys.stdlib_module_names):
            setattr(module, name, value)
    sys.modules["answer"] = module
    checker.space = module.__dict__
    program.run_checks(tests, module.__dict__)
