"""The process of the answer (the program under test): runs the answer, then performs the operations
that the checker requests on its objects.
"""

import contextlib
import importlib
import io
import json
import operator
import types
from collections.abc import Callable
from typing import Any

from rftmega.sandbox import json_values, program

# No comparison and no arithmetic: an object asked whether it equals 4 would learn the
# expected value.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda what, *given, **named: what(*given, **named),
    "getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "setitem": operator.setitem,
    "delitem": operator.delitem, "iter": iter, "next": next, "len": len, "bool": bool, "str": str, "repr": repr,
    "isinstance": isinstance,
}  # fmt: skip


class Served:
    """Served holds the objects of the answer's process that the checker's process can refer to by a
    number (handle); an object has only one handle.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.handles: dict[int, int] = {}

    def encode(self, value: Any) -> Any:
        return json_values.encode(value, self.hand_out)

    def hand_out(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if id(value) not in self.handles:
            self.handles[id(value)] = len(self.objects)
            self.objects.append(value)
        bases = (
            builtin_bases(value)
            if isinstance(value, type) and issubclass(value, BaseException)
            else []
        )
        kind = (
            value
            if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
            else type(value)
        )
        where = (
            "type"
            if isinstance(value, type) and kind.__module__ == "builtins"
            else str(kind.__module__)
        )
        return ["object", [self.handles[id(value)], where, str(kind.__qualname__), bases]]

    def decode(self, held: Any) -> Any:
        return json_values.decode(held, self.take_back)

    def take_back(self, tag: str, rest: Any) -> Any:
        if tag == "object":
            return self.objects[rest]
        found: Any = importlib.import_module(rest[0])
        for name in rest[1].split("."):
            found = getattr(found, name)
        return found

    def do(self, request: Any) -> dict[str, Any]:
        """Performs one request of the checker. Returns the encoded value or exception, the printed
        text, and the arguments after the call, which may have changed them.

        `request`: {"do": key of OPERATIONS, "given": arguments, "named": keyword arguments}.
        """
        printed = io.StringIO()
        given, named = (
            [self.decode(each) for each in request["given"]],
            self.decode(request["named"]),
        )
        told: dict[str, Any] = {}
        with contextlib.redirect_stdout(printed):
            try:
                told["value"] = self.encode(OPERATIONS[request["do"]](*given, **named))
            except BaseException as error:
                told["raised"] = builtin_bases(type(error))
                told["name"] = (
                    getattr(error, "name", None) if isinstance(error, NameError) else None
                )
                told["object"] = self.hand_out(type(error))[1][0]
                told["args"] = [
                    each if isinstance(each, str | int | float | None) else repr(each)
                    for each in error.args
                ]
        told["given"] = [self.encode(each) for each in (*given, *named.values())]
        return told | {"printed": printed.getvalue()}


def builtin_bases(kind: type) -> list[str]:
    return [
        base.__name__
        for base in kind.__mro__
        if base.__module__ == "builtins" and base is not object
    ]


def serve(answer: str, requests: int, replies: int) -> int:
    """Runs the source text `answer` and sends the names that it defines to the pipe `replies`; then
    serves requests until the pipe `requests` ends. Returns the exit status 0.
    """
    space = program.run_answer(answer)
    served = Served()
    with open(requests, "rb") as asked, open(replies, "wb") as told:
        names = {
            name: served.encode(value)
            for name, value in list(space.items())
            if not name.startswith("__")
        }
        told.write(json.dumps(names).encode() + b"\n")
        told.flush()
        for line in asked:
            told.write(json.dumps(served.do(json.loads(line))).encode() + b"\n")
            told.flush()
    return 0
