"""Worker process that compares expressions, run as a script: reads JSON lines [response, label,
seconds] and writes lines of 0 or 1. If the response is null, the line says whether the label can be
parsed; if the label is null, it is the source of the response's last expression as JSON.

`math.py` starts and ends this process. The script imports nothing of this package, so that the
process starts in half a second. Expressions that math-verify misreads (currency, numbers in a base,
congruences, scientific notation, grouped digits, full-width characters, answers in words, times,
complex exponentials), wrongly takes for different (inequalities and intervals) or for equal (sets
and tuples, e and E, tiny numbers) are handled here.
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
from sympy import (
    And,
    Complement,
    E,
    Eq,
    Expr,
    I,
    Intersection,
    Interval,
    N,
    S,
    Symbol,
    UnevaluatedExpr,
    Union,
    exp,
    oo,
    pi,
)
from sympy import FiniteSet as SymPyFiniteSet
from sympy import Set as Region
from sympy.core.relational import Relational

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
# Full-width characters, and signs that have a command in LaTeX
SIGNS = {0xFF01 + at: chr(0x21 + at) for at in range(94)}
SIGNS |= {
    ord(sign): f" \\{command} "
    for sign, command in {
        "∅": "emptyset", "∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "∪": "cup", "∈": "in", "π": "pi",
    }.items()
}  # fmt: skip
SIGNS |= {ord("，"): "，", ord("。"): ". ", ord("、"): ", ", ord("\u3000"): " "}
GROUPED = re.compile(
    r"(?<![\d.,^_])[1-9]\d{0,2}"
    r"(?:(?:\\[,;:!> ]|~|\\thinspace(?![a-z])|\\hspace\{[^{}]*\}|[\u2009\u202f\xa0]|，)\s*\d{3})+(?!\d)"
)
FRAMED = re.compile(r"\\(?:fbox|framebox)\s*\{")
NOT_DIGITS = re.compile(r"\\hspace\{[^{}]*\}|\D")
REWRITTEN = (
    (re.compile("，"), ", "),
    (re.compile(r"\\boxed\s+\{"), r"\\boxed{"),
    (re.compile(r"\\mathrm\s*\{([ei])\}"), r"\1"),
    (re.compile(r"\{\s*:\s*\}|(?:\\[,;!])?:\\[,;!]"), ":"),
    (re.compile(r"答案?\s*(?:应?该?[是为]\s*:?|:)\s*"), "\nAnswer: "),
    # \{x \mid x > 3\}
    (
        re.compile(
            r"\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?\s*(?:\\mid(?![a-z])|\\vert(?![a-z])|\||:)"
            r"(?=[^{}=]{0,80}(?:[<>]|\\[lgn]e))([^{}=]{0,80}\b\1\b[^{}=]{0,80})\\\}"
        ),
        r"\2",
    ),
    # "..., for all integers k", "..., where k is an integer"
    (
        re.compile(
            r"(?:\\text\s*\{\s*)?+for (?:all|any|every|some) integers?[\s}]*+(\$)?[klmn](?(1)\$)(?![a-z])"
        ),
        "",
    ),
    (
        re.compile(
            r"(?:[,;(]|\\q?quad(?![a-z])|\\text\s*\{\s*(?=w|f)|(?=\b[wf]))\s*+(?:\(|\\text\s*\{)?\s*+"
            r"(?:(?:where|with|for(?: any| all| some| every)?(?: integers?)?)[\s}]*+)?+(?<=[\s,;(}])(\$)?[klmn]\s*"
            r"(?:\\in\s*(?:\\mathbb\s*\{?\s*Z\s*\}?|\\Z|ℤ)|(?:\\text\s*\{)?\s*is an(?:y)? integer\}?)(?(1)\$)\)?"
        ),
        "",
    ),
)
STATED = re.compile(r"(?i)(?:.*\b)?answer(?:\s+is|\s*:)(?:\s*:)?[\s*]*")
IN_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
# In lower case. Nothing satisfies the conditions:
EMPTY = re.compile(
    r"(?:\w ?(?:=|\\in) ?)?(?:\\emptyset|\\varnothing|\\?\{ ?\\?\})|(?:the )?(?:empty|null) set|none|(?:方程)?无解|空集"
    r"|(?:(?:there (?:is|are|exists?)|(?:it|(?:the|this) (?:equation|system|inequality|problem)) has) )?"
    r"no (?:real )?(?:solutions?|roots?)(?: exists?)?|no such \w+(?: exists?)?"
    r"|(?:(?:a|the|any) )?(?:real )?solutions? do(?:es)? not exist"
)
# A quantity has no value:
UNDEFINED = re.compile(
    r"dne|d\.n\.e|(?:(?:it|(?:the|this|such an?) (?:[\w-]+ ){0,2}[\w-]+) )?(?:is )?(?:undefined|not defined)"
    r"|(?:(?:it|limit|(?:the|this|such an?) (?:[\w-]+ ){0,2}[\w-]+) )?do(?:es)?(?: not|n't) exist|(?:极限)?不存在|无定义"
)
TIME = re.compile(r"(?i)(?P<hour>[01]?\d|2[0-4]):(?P<minute>[0-5]\d)(?: ?(?P<half>[ap])\.? ?m\.?)?")
EITHER = re.compile(r"(?<![a-z])or(?![a-z])|\\lor(?![a-z])|\\vee(?![a-z])|或")
SURE = re.compile(r"[\[\]<>]|\\(?:infty|cup|in|le|ge|leq|geq|ne|neq|mathbb)(?![a-z])")
MEMBER = re.compile(r"^[a-z](?:=|\\in(?![a-z]))")
PARAMETERS = ("k", "l", "m", "n")  # names of integers, as in 2k\pi
MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def equal(response: str, label: str) -> bool:
    """Returns whether the response's last expression equals the label's expression. math-verify's
    timeouts are off, because the alarm signal ends this process.
    """
    response, label = plain(response), plain(label)
    said, right = final(response), final(label)
    alone = response.count("\\boxed") == 1 or response.strip() == label.strip()
    if (alone or stated(response)) and said and said == right:
        return True
    told = compared(said, right)
    if told is not None:
        return told
    golds, answers = expressions(label), found(response)
    return any(
        verify([one], [other], timeout_seconds=None) and not misjudged(one, other)
        for gold, answer in product(golds, answers)
        for one, other in [alike(gold, answer, said, right)]
    )


def found(response: str) -> list[Any]:
    """Returns the response's last expression as math-verify reads it: a SymPy object, if possible,
    and its source; an empty list if there is none.
    """
    read = parse(response, parsing_timeout=None)
    if not read and stated(response):
        read = parse(f"\\boxed{{{final(response)}}}", parsing_timeout=None)
    return list(read)


def answer_in(response: str) -> str:
    """Returns the source of the response's last expression, for people to read."""
    response = plain(response)
    said = final(response)
    if stated(response) or "\\boxed{" in response or missing(said):
        return said
    return next((each for each in found(response) if isinstance(each, str)), "")


def expressions(label: str) -> list[Any]:
    """Returns the expressions parsed from a label, which is an expression or a text that contains
    one.
    """
    marked = any(sign in label for sign in MARKS)
    read = parse(label, parsing_timeout=None) if marked else []
    if not read and stated(label):
        label = final(label)
    return list(read or parse(f"\\boxed{{{label.replace('$', '')}}}", parsing_timeout=None))


def plain(text: str) -> str:
    """Returns the text as math-verify can read it: without currency signs, full-width characters,
    separators of thousands and declarations of integers, with scientific notation written out.
    """
    text = GROUPED.sub(lambda number: NOT_DIGITS.sub("", number[0]), text.translate(SIGNS))
    if "\\boxed" not in text:
        text = FRAMED.sub(r"\\boxed{", text)
    for pattern, replacement in REWRITTEN:
        text = pattern.sub(replacement, text)
    return SCIENTIFIC.sub(_decimal, CURRENCY.sub("", text))


def _decimal(number: re.Match[str]) -> str:
    value = Decimal(number[0])
    return f"{value:f}" if abs(value.adjusted()) < LARGEST_EXPONENT else number[0]


def final(text: str) -> str:
    """Returns the source of the last expression in `text`, with single spaces between words.

    The expression is the content of the last \\boxed. If there is none, the expression is the last
    formula between dollar signs or LaTeX delimiters. If there is no formula either, the expression
    is the last line, without a lead such as "The answer is" or "answer:".
    """
    found = text.strip()
    if (at := found.rfind("\\boxed{")) >= 0:
        inside = found[at + len("\\boxed") :]
        found = inside[1 : closing(inside)]
    elif formulas := MATH.findall(found):
        found = next(filter(None, formulas[-1]))
    else:
        last = found.rpartition("\n")[2]
        lead = STATED.match(last)
        found = last[lead.end() :] if lead else last
    found = re.sub(r"\\[,;! ]|\\left(?![a-z])|\\right(?![a-z])", "", found)
    return " ".join(found.split()).removesuffix(".")


def stated(text: str) -> bool:
    """Returns whether the last line of `text` gives an answer ("answer: x") outside of formulas."""
    last = text.strip().rpartition("\n")[2]
    return not any(sign in text for sign in MARKS) and bool(STATED.match(last))


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
    congruences, sets and tuples, times, answers in words); None if these rules do not apply and
    math-verify can decide. `said`: the response's expression, `right`: the label's.
    """
    if missing(said) or missing(right):
        return missing(said) == missing(right)
    if time(right) and same_time(said, right) is not None:
        return same_time(said, right)
    one, other = based(said), based(right)
    if one != other:
        return False
    said, right = said.replace(" ", ""), right.replace(" ", "")
    if other and BASED.fullmatch(right):
        return True
    if CONGRUENT.search(right):
        return congruence(said) == congruence(right)
    lists = {listed(MEMBER.sub("", side)) for side in (said, right)}
    return False if lists == {"{", "("} else None


def missing(text: str) -> str:
    """Returns "empty" for a text that says that there is no solution, "undefined" for a text that
    says that there is no value, "" for any other text.
    """
    words = " ".join(IN_TEXT.sub(r" \1 ", text).lower().split()).rstrip(".")
    for name, pattern in (("empty", EMPTY), ("undefined", UNDEFINED)):
        if pattern.fullmatch(words):
            return name
    return ""


def time(text: str) -> re.Match[str] | None:
    """Returns the match of TIME if the text is a time of day, such as 11:30 p.m."""
    return TIME.fullmatch(" ".join(IN_TEXT.sub(r" \1 ", text).split()))


def same_time(said: str, right: str) -> bool | None:
    """Returns whether a text ends with the time `right`; None if math-verify must decide, since
    `right` may also be a ratio.
    """
    one, other = time(" ".join(said.split()[-1:])) or time(said), time(right)
    if other is None:
        return None
    if one and one["half"] and other["half"]:
        return clock(one) == clock(other) and one["half"].lower() == other["half"].lower()
    if one and not other["half"] and clock(one) == clock(other):
        return True
    return False if other["minute"].startswith("0") and other["minute"] != "00" else None


def clock(time: re.Match[str]) -> tuple[int, int]:
    """Returns (hour, minute) as they are written."""
    return int(time["hour"]), int(time["minute"])


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


def alike(gold: Any, answer: Any, said: str, right: str) -> tuple[Any, Any]:
    """Returns the label's and the response's expression in a form that math-verify can compare:
    inequalities as sets of numbers beside an interval, i as the imaginary unit beside a complex
    exponential, and the same name for an integer that each names differently.

    `said`, `right`: sources of the response's and the label's last expression. An open interval
    such as (3, 5) may also be a point. So it equals an inequality only in the response.
    """
    if isinstance(gold, str) or isinstance(answer, str):
        return gold, answer
    one, other = within(gold), within(answer)
    if isinstance(one, Region) != isinstance(other, Region) or EITHER.search(said + right):
        one, other = region(one, right), region(other, said)
        if one is not None and other is not None and SURE.search(right):
            return one, other
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return gold, answer
    if any(turns(side) for side in (gold, answer)):
        return imaginary(gold), imaginary(answer)
    mine, theirs = (
        {each for each in side.free_symbols if getattr(each, "name", "") in PARAMETERS}
        if side.has(pi)
        else set()
        for side in (gold, answer)
    )
    if len(mine) == len(theirs) == 1 and gold.free_symbols == mine:
        return gold, answer.subs(theirs.pop(), mine.pop())
    return gold, answer


def within(expression: Any) -> Any:
    """Returns the set of an expression "x in set", which math-verify reads as x = set; any other
    expression unchanged.
    """
    member = isinstance(expression, Eq) and isinstance(expression.rhs, Region)
    return expression.rhs if member else expression


def region(expression: Any, source: str) -> Region | None:
    """Returns the real numbers that a solved inequality (x > 3) or an interval describes; None for
    any other expression, such as x^2 > 9, which is still to be solved. `source`: its LaTeX.
    """
    if expression == S.Reals:
        return Interval(-oo, oo)
    if isinstance(expression, Interval | Union):
        return expression
    if isinstance(expression, Complement):
        whole, left_out = expression.args
        return whole - (SymPyFiniteSet(*left_out.args) if left_out.is_FiniteSet else left_out)
    if isinstance(expression, Relational):
        return expression.as_set() if solved(expression) else None
    either = not isinstance(expression, And)
    if not expression.args or (either and not EITHER.search(source)):
        return None
    parts = [region(part, source) for part in expression.args]
    one_name = len(getattr(expression, "free_symbols", ())) == 1
    if not one_name or any(part is None for part in parts):
        return None
    return Union(*parts) if either else Intersection(*parts)


def solved(relation: Relational) -> bool:
    """Returns whether a relation is an inequality between a name and a real number."""
    sides = (relation.lhs, relation.rhs)
    names = [side for side in sides if isinstance(side, Symbol)]
    numbers = [side for side in sides if side.is_number and side.is_extended_real]
    return not isinstance(relation, Eq) and len(names) == len(numbers) == 1


def turns(expression: Expr) -> bool:
    """Returns whether an expression contains an exponential such as e^{i pi / 3}."""
    return any(
        power.args[0].has(pi) and any(each.name == "i" for each in power.args[0].free_symbols)
        for power in expression.atoms(exp)
    )


def imaginary(expression: Expr) -> Expr:
    """Returns the expression with the imaginary unit in place of the name i."""
    return expression.subs({each: I for each in expression.free_symbols if each.name == "i"})


def misjudged(gold: Any, answer: Any) -> bool:
    """Returns whether `gold`, the label's expression, and `answer`, the response's, differ although
    math-verify considers them equal.
    """
    one, other = (side.rhs if isinstance(side, Eq) else side for side in (gold, answer))
    if isinstance(one, And) and getattr(other, "is_FiniteSet", False):
        return True
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


def reply(response: str | None, label: str | None) -> int | str:
    """Returns what the process writes for a request, see above."""
    if response is None:
        return int(bool(expressions(plain(label or ""))))
    return answer_in(response) if label is None else int(equal(response, label))


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
            told = reply(response, label)
        # any error of parsing free text, including MemoryError and RecursionError
        except Exception:
            told = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
