"""What code in an answer can write to the pipe of a confined scorer ends nothing."""

import pytest

from rftmega.sandbox.reasoning_gym_worker import reply_of


@pytest.mark.parametrize(
    "forged",
    [
        *(b"", b"5", b"{", b"[" * 100_000, b"{}", b'{"score": "1"}', b'{"score": NaN}'),
        *(b'{"score": 1e999}', b'{"score": null}', b'{"raised": 3}', b"\xff"),
    ],
)
def test_what_is_no_reply_is_none(forged: bytes) -> None:
    assert reply_of(forged) == {"lost": "no reply"}


def test_scores_and_exceptions_are_read() -> None:
    assert reply_of(b'{"score": 1, "more": 2}') == {"score": 1.0}
    assert reply_of(b'{"raised": "ValueError"}') == {"raised": "ValueError"}
