"""Runs tested code and its tests; called in the process inside the sandbox."""

import ast
import atexit
import hashlib
import io
import os
import sys
import threading
import types

PASSED = b"passed"
DEEPEST = 10_000  # maximum number of elements inspected in a compared container


def proof(token: bytes) -> bytes:
    """Returns the proof that the tests have passed: a hash with `token` as key."""
    return hashlib.blake2b(PASSED, key=token).digest()


def run_answer(answer: str) -> dict[str, object]:
    """Runs the source text `answer` (the tested program) as a module and returns its namespace."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses and pickle look for it
    exec(compile(answer, "<answer>", "exec"), module.__dict__)
    return module.__dict__


def run_checks(tests: str, space: dict[str, object]) -> None:
    """Runs the source text `tests` with the global names `space`, in a process that does not run
    the answer.

    Exceptions of the tests are not caught.
    """
    exec(compile(tests, "<tests>", "exec"), space)


def run_tests(answer: str, tests: str, token_fd: int, verdict_fd: int) -> None:
    """Runs the answer, then the tests in its namespace, then writes `proof(token)` to the pipe
    `verdict_fd`; the token is read from the pipe `token_fd`.

    All functions needed after the answer has run are looked up before, as the answer could replace
    them. While the answer runs, the token is in no Python variable and in no pipe, only in the
    state of a hash.
    """
    state = hashlib.blake2b(key=os.read(token_fd, 64))
    os.close(token_fd)
    write, run, forget_trace, forget_profile = os.write, exec, sys.settrace, sys.setprofile
    name = "_" + os.urandom(8).hex()
    first = compile(answer, "<answer>", "exec")
    second = compile(honest_comparisons(tests, name), "<tests>", "exec")
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses and pickle look for it
    space = module.__dict__
    run(first, space)
    space[name] = honest
    run(second, space)
    forget_trace(None)
    forget_profile(None)
    state.update(PASSED)
    write(verdict_fd, state.digest())


def run_program(answer: str) -> int:
    """Runs the source text `answer` as a main program on this process's standard input and output.

    Returns the exit status.
    """
    sys.stdin, sys.stdout = io.TextIOWrapper(io.FileIO(0)), io.TextIOWrapper(io.FileIO(1, "w"))
    sys.argv = ["answer.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    out, status = sys.stdout, 0
    try:
        exec(compile(answer, "<answer>", "exec"), module.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter would
    atexit._run_exitfuncs()
    for stream in (out, sys.stdout):
        stream.flush()
    return status & 0xFF


def honest_comparisons(tests: str, name: str) -> ast.Module:
    """Returns the tests' syntax tree with every operand of ==, != and `in` passed through a
    function called `name`, which is `honest`.
    """

    class Wrap(ast.NodeTransformer):
        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if any(isinstance(operator, ast.Eq | ast.NotEq | ast.In) for operator in node.ops):
                node.left, node.comparators = (
                    wrapped(node.left),
                    [wrapped(each) for each in node.comparators],
                )
            return node

    def wrapped(value: ast.expr) -> ast.expr:
        return ast.Call(ast.Name(name, ast.Load()), [value], [])

    return ast.fix_missing_locations(Wrap().visit(ast.parse(tests)))


def honest(value: object) -> object:
    """Returns `value` unchanged.

    Raises AssertionError if the value, or an element of it, claims to equal a new object, which
    nothing else equals.
    """
    left, looked = [value], 0
    while left and looked < DEEPEST:
        looked += 1
        item = left.pop()
        if isinstance(item, list | tuple | set | frozenset) and type(item) in (
            list,
            tuple,
            set,
            frozenset,
        ):
            left.extend(item)
        elif isinstance(item, dict) and type(item) is dict:
            left.extend(item.values())
        elif type(item).__eq__ is not object.__eq__ and (item == object()) is True:
            raise AssertionError("an answer that equals everything")
    return value
