"""The interpreter process of an interactive session (repl.py): runs snippets of code as at a Python
prompt.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import traceback
import types

FRAMES = 8  # innermost frames shown in a traceback


def reply(word: str, *, well: bool) -> bytes:
    """Returns the line that reports the end of a snippet, which begins with the request's random
    `word`; `well`: whether it raised nothing.
    """
    return f"{word} {'well' if well else 'raised'}\n".encode()


def serve(requests: int, replies: int) -> int:
    """Runs the snippets of code that arrive on the pipe `requests` until it ends, and writes one
    reply per snippet to the pipe `replies`. Returns the exit status.
    """
    write = os.write  # looked up before the code can replace it
    os.dup2(1, 2)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.stdin = open(os.devnull)  # noqa: SIM115  of the whole process
    number = 0
    with open(requests, "rb") as asked:
        while header := asked.readline():
            request = json.loads(header)
            code = asked.read(request["size"]).decode(errors="replace")
            number += 1
            _open_streams()
            well = run(code, f"<call {number}>", module.__dict__)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # replaced or closed by the code
                    stream.flush()
            write(replies, reply(request["word"], well=well))
    return 0


def run(code: str, name: str, space: dict[str, object]) -> bool:
    """Runs code with the global names `space`, and prints the value of a final expression, or a
    traceback. Returns whether the code raised nothing. `name`: file name in tracebacks.
    """
    try:
        body, last = compiled(code, name)
        exec(body, space)
        if last is not None:
            value = eval(last, space)
            if value is not None:
                space["_"] = value
                sys.stdout.write(repr(value) + "\n")
    except BaseException as error:  # SystemExit as well: the namespace is kept
        with contextlib.suppress(BaseException):
            sys.stdout.write(told(error))
        return False
    return True


def compiled(code: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Returns the compiled code, and separately its final expression, or None if it does not end
    with one. `name`: file name in tracebacks.
    """
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body.pop().value), name, "eval")  # type: ignore[attr-defined]
    return compile(tree, name, "exec"), last


def told(error: BaseException) -> str:
    """Returns the text of an exception's traceback from the user code's first frame on, shortened
    to the innermost frames.
    """
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
        trace = trace.tb_next
    written = traceback.TracebackException(type(error), error, trace, limit=-FRAMES, compact=True)
    return "".join(written.format(chain=False))


def _open_streams() -> None:
    """Opens new standard streams for the code, even if earlier code closed or replaced them."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True
        )
        setattr(sys, name, stream)
