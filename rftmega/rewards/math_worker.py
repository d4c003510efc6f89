"""Worker process that compares expressions, run as a script: reads JSON lines [response, label,
seconds] and writes lines of 0 or 1. If the response is null, the line says whether the label can be
parsed.

`math.py` starts and ends this process. The script imports nothing of this package, so that the
process starts in half a second. Expressions that math-verify misreads (currency, numbers in a base,
congruences, scientific notation) or wrongly takes for equal (sets and tuples, e and E, tiny
numbers) are handled here.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from decimal import Decimal
from itertools import product
from typing import Any

from math_verify import parse, verify
from sympy import E, Eq, Expr, N, Symbol, UnevaluatedExpr

MEMORY = 4 << 30  # bytes of address space
FAR = 5e-4  # relative: numbers below 1 that differ by more are not equal
NOTHING = 1e-40  # smaller numbers are rounding errors of expressions that are 0
LARGEST_EXPONENT = 400
MARKS = ("$", "\\boxed", "\\(", "\\[")
CURRENCY = re.compile(r"(?<!\\)\\\$")
# 1e-5, 1.6e-19, 2E3; 2e-3 may be Euler's number twice, minus 3
SCIENTIFIC = re.compile(
    r"(?<![\w.\\])(?:1(?=e)|\d+\.\d+|\d+(?=E)|\d+(?=e[+-]?\d\d))[eE][+-]?\d{1,3}(?![\w.]*\w)"
)
BASED = re.compile(
    r"(?<![\w.\\])\(?(?P<digits>(?=[A-Z.]*\d)[\dA-Z]+(?:\.[\dA-Z]+)?)\)?_(?:(?P<one>\d)(?!\d)|\{(?:\\text\{)?(?P<base>\d+|[a-z]+)\}{1,2}"
    r"|\\text\{(?P<word>[a-z]+)\})"
)
WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BASES = {word: str(number) for number, word in enumerate(WORDS, start=2)} | {"sixteen": "16"}
CONGRUENT = re.compile(r"(?<![a-z])\\?[pb]?mod(?![a-z])|\\equiv(?![a-z])")
CONGRUENCE = re.compile(
    r"(?:(?P<name>\w+)(?:=|\\equiv))?(?P<residue>-?\d+)\(?\\?[pb]?mod\{?(?P<modulus>[1-9]\d*)\}?\)?"
)
BRACKETS = {"{": "}", "(": ")"}
MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def equal(response: str, label: str) -> bool:
    """Returns whether the response's last expression equals the label's expression. math-verify's
    timeouts are off, because the alarm signal ends this process.
    """
    response, label = plain(response), plain(label)
    said, right = final(response), final(label)
    alone = response.count("\\boxed") == 1 or response.strip() == label.strip()
    if alone and said and said == right:
        return True
    told = compared(said, right)
    if told is not None:
        return told
    golds, answers = expressions(label), parse(response, parsing_timeout=None)
    return any(
        verify([gold], [answer], timeout_seconds=None) and not misjudged(gold, answer)
        for gold, answer in product(golds, answers)
    )


def expressions(label: str) -> list[Any]:
    """Returns the expressions parsed from a label, which is an expression or a text that contains
    one.
    """
    marked = any(sign in label for sign in MARKS)
    found = parse(label, parsing_timeout=None) if marked else []
    return list(found or parse(f"\\boxed{{{label.replace('$', '')}}}", parsing_timeout=None))


def plain(text: str) -> str:
    """Returns the text without currency signs, and with scientific notation written out."""
    return SCIENTIFIC.sub(_decimal, CURRENCY.sub("", text))


def _decimal(number: re.Match[str]) -> str:
    value = Decimal(number[0])
    return f"{value:f}" if abs(value.adjusted()) < LARGEST_EXPONENT else number[0]


def final(text: str) -> str:
    """Returns the source of the last expression in `text`, with single spaces between words: the
    content of the last boxed expression, else the last formula between dollar signs or LaTeX
    delimiters, else the last line.
    """
    found = text.strip()
    if (at := found.rfind("\\boxed{")) >= 0:
        inside = found[at + len("\\boxed") :]
        found = inside[1 : closing(inside)]
    elif formulas := MATH.findall(found):
        found = next(filter(None, formulas[-1]))
    else:
        found = found.splitlines()[-1] if found else ""
    found = re.sub(r"\\[,;! ]|\\left(?![a-z])|\\right(?![a-z])", "", found)
    return " ".join(found.split()).removesuffix(".")


def closing(text: str) -> int:
    """Returns the index of the bracket that closes the bracket with which the text begins; the
    text's length if no bracket closes it.
    """
    depth, opening = 0, text[0]
    for at, sign in enumerate(text):
        depth += (sign == opening) - (sign == BRACKETS[opening])
        if not depth:
            return at
    return len(text)


def compared(said: str, right: str) -> bool | None:
    """Returns whether two expressions are equal by rules that math-verify lacks (bases,
    congruences, sets and tuples); None if these rules do not apply and math-verify can decide.
    `said`: the response's expression, `right`: the label's.
    """
    one, other = based(said), based(right)
    if one != other:
        return False
    said, right = said.replace(" ", ""), right.replace(" ", "")
    if other and BASED.fullmatch(right):
        return True
    if CONGRUENT.search(right):
        return congruence(said) == congruence(right)
    return False if {listed(said), listed(right)} == {"{", "("} else None


def based(text: str) -> tuple[str, str] | None:
    """Returns (digits, base) of the last number in the text that is written with a base; None if
    there is none or its base is ten.
    """
    for found in reversed(list(BASED.finditer(text))):
        base = found["one"] or found["base"] or found["word"]
        base = BASES.get(base, base)
        return None if base == "10" else (found["digits"], base)
    return None


def congruence(text: str) -> tuple[int, str] | str:
    """Returns (residue, modulus) of a text that is a congruence; the text itself if it is not a
    congruence.
    """
    simple = re.sub(r"\\text\{(\w*)\}", r"\1", text)
    found = CONGRUENCE.fullmatch(simple)
    if found is None:
        return text
    return int(found["residue"]) % int(found["modulus"]), found["modulus"]


def listed(text: str) -> str:
    """Returns the opening bracket of a set or tuple of two or more elements; "" for any other text."""
    inner = text.replace("\\{", "{").replace("\\}", "}")
    if inner[:1] not in BRACKETS or closing(inner) != len(inner) - 1:
        return ""
    depth = 0
    for sign in inner[1:-1]:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            return inner[0]
    return ""


def misjudged(gold: Any, answer: Any) -> bool:
    """Returns whether `gold`, the label's expression, and `answer`, the response's, differ although
    math-verify considers them equal.
    """
    one, other = (side.rhs if isinstance(side, Eq) else side for side in (gold, answer))
    if any(side == E for side in (one, other)) and any(
        isinstance(side, Symbol) and side.name == "e" for side in (one, other)
    ):
        return True
    numbers = isinstance(one, Expr) and isinstance(other, Expr)
    if not numbers or not (one.is_number and other.is_number):
        return False
    if one.has(UnevaluatedExpr) or other.has(UnevaluatedExpr):  # a percentage
        return False
    size = max(abs(N(one)), abs(N(other)))
    return bool(NOTHING < size < 1 and abs(N(one) - N(other)) > FAR * size)


def main() -> None:
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keeps a library's prints out of the answers
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard)
    )
    # Ctrl-C is the trainer's; this process ends with its input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The default action of the signal ends the process even within one long multiplication, and
    # without any supervisor.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        response, label, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            readable = response is None and expressions(plain(label))
            score = int(bool(readable) or (response is not None and equal(response, label)))
        # any error of parsing free text, including MemoryError and RecursionError
        except Exception:
            score = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(f"{score}\n")
        answers.flush()


if __name__ == "__main__":
    main()
