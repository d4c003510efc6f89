import time
import weakref
from collections.abc import Callable
from threading import Event

import pytest

from rftmega.checkpoints import background_writer
from rftmega.checkpoints.background_writer import BackgroundWriter
from rftmega.runtime.parallel.watchdog import watched


def test_a_save_that_takes_longer_than_the_watch_allows_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_writer, "ROUND", 0.05)
    ended: list[int] = []
    with watched(0.5, 0, end=ended.append):
        assert (
            BackgroundWriter(lambda rest: time.sleep(2), lambda given_up: time.sleep(1)).wait()
            == []
        )
    assert ended == []


def test_what_a_save_wrote_is_given_back_when_it_has_ended() -> None:
    class Large:
        def __call__(self) -> None: ...

    part, whole = Large(), Large()
    held = [weakref.ref(part), weakref.ref(whole)]
    done = BackgroundWriter(lambda rest, part=part: part(), lambda given_up, whole=whole: whole())  # type: ignore[misc]
    del part, whole
    assert done.wait() == []
    assert [ref() for ref in held] == [None, None]


def test_a_part_rests_while_the_training_goes_on_and_not_once_somebody_waits() -> None:
    begun = Event()

    def part(rest: Callable[[float], object]) -> None:
        rest(0.01)
        begun.set()
        rest(1e6)  # a test that waits for it never ends
        rest(1e6)

    saving = BackgroundWriter(part, None)
    assert begun.wait(30)
    assert saving.wait() == []


def test_a_request_to_stop_ends_the_rests_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits yet: the step that is under way is ended first, and then another save is to
    come.
    """
    ended = Event()
    monkeypatch.setattr(background_writer.preemption.request, "came", 15)

    def part(rest: Callable[[float], object]) -> None:
        rest(1e6)
        ended.set()

    BackgroundWriter(part, None)
    assert ended.wait(30)
