import ast
import os

import pytest

from rftmega.sandbox.program import honest, honest_comparisons, proof, run_tests


class Yes:
    def __eq__(self, other: object) -> bool:
        return True


class Price:
    """An honest class of an answer's: it equals numbers."""

    def __init__(self, cents: int):
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return self.cents == (other.cents if isinstance(other, Price) else other)


@pytest.mark.parametrize(
    "lie",
    [Yes(), [1, Yes()], {"a": (Yes(),)}, type("Word", (str,), {"__eq__": lambda *each: True})("x")],
)
def test_what_equals_everything_is_no_answer(lie: object) -> None:
    with pytest.raises(AssertionError, match="equals everything"):
        honest(lie)


def test_what_equals_some_things_is_one() -> None:
    loop: list[object] = [1, "a", {2}, {"k": Price(3)}, None, float("nan"), Price(4)]
    loop.append(loop)
    assert honest(loop) is loop


@pytest.mark.parametrize(
    ("tests", "passes"),
    [
        ("assert f(7) == 7", True),
        ("assert f(7) != 8 and f(7) in [6, 7] and 7 in [f(7)]", True),
        ("assert f(Price(3)) == 3", True),
        ("assert 1 < f(2) == 2 < 3", True),
        ("assert f(7) == 8", False),
        ("assert f(Yes()) == 7", False),
        ("assert 7 == f(Yes())", False),
        ("assert f(Yes()) in [6, 7]", False),
        ("def check(g):\n    assert g(Yes()) == 7\ncheck(f)", False),
    ],
)
def test_tests_mean_what_they_meant_except_to_liars(tests: str, passes: bool) -> None:
    space = {"f": lambda x: x, "Yes": Yes, "Price": Price, "guard": honest}
    run = compile(honest_comparisons(tests, "guard"), "<tests>", "exec")
    if passes:
        exec(run, space)
    else:
        with pytest.raises(AssertionError):
            exec(run, space)


def said_after(answer: str, tests: str, token: bytes) -> bytes:
    (token_out, token_in), (verdict_out, verdict_in) = os.pipe(), os.pipe()
    os.write(token_in, token)
    os.close(token_in)
    try:
        run_tests(answer, tests, token_out, verdict_in)
    finally:
        os.close(verdict_in)
        said = os.read(verdict_out, 999)
        os.close(verdict_out)
    return said


def test_the_proof_needs_the_token_and_the_tests_end() -> None:
    token = os.urandom(32)
    assert said_after("x = 1", "assert x == 1", token) == proof(token) != proof(os.urandom(32))
    with pytest.raises(AssertionError):
        said_after("x = 2", "assert x == 1", token)
    assert ast.unparse(honest_comparisons("a < b", "g")) == "a < b", (
        "only what asks for equality is changed"
    )
