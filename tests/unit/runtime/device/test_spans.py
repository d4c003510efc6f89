import threading
from collections.abc import Iterator

import pytest

from rftmega.runtime.device import spans
from rftmega.runtime.device.spans import SpanRecorder, span, spanned


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanRecorder]:
    fresh = SpanRecorder()
    monkeypatch.setattr(spans, "recorder", fresh)
    return fresh


def test_nothing_is_timed_while_nobody_asks(
    recorder: SpanRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "clock", lambda: pytest.fail("the clock was read"))
    with span("generate"):
        recorder.start("forward")
        recorder.finish("forward")
        recorder.count("tokens", 5)
    assert recorder.take() == {}
    assert recorder.stop() == []


def test_seconds_and_counts_add_up_until_they_are_taken(
    recorder: SpanRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0, 2_000_000_000, 5_000_000_000, 5_500_000_000])
    monkeypatch.setattr(spans, "clock", lambda: next(times))
    recorder.measuring = True
    for _ in range(2):
        spanned("generate")(lambda: recorder.count("tokens", 3))()
    assert recorder.take() == {"generate": 2.5, "tokens": 6}
    assert recorder.take() == {}


def test_what_the_device_computes_is_summed_and_recorded(recorder: SpanRecorder) -> None:
    recorder.measuring = True
    for recording in (False, True):
        if recording:
            recorder.record()
        recorder.start("forward")
        recorder.start("schedule")
        recorder.finish("schedule")
        recorder.finish("forward")
        found = recorder.take()
        assert found.keys() == {"forward", "schedule"}
        assert 0 <= found["schedule"] <= found["forward"]
    inner, outer = recorder.stop()
    assert (inner.name, outer.name) == ("schedule", "forward")
    assert outer.begin <= inner.begin <= inner.end <= outer.end


def test_what_began_before_a_recording_is_not_in_it(recorder: SpanRecorder) -> None:
    recorder.measuring = True
    recorder.start("forward")
    recorder.record()
    recorder.finish("forward")
    recorder.finish("backward")
    assert recorder.stop() == []


def test_spans_of_threads_and_of_what_failed_are_kept(recorder: SpanRecorder) -> None:
    recorder.record()
    thread = threading.Thread(target=spanned("reward")(lambda: None), name="judge")
    thread.start()
    thread.join()
    with pytest.raises(ZeroDivisionError), span("generate"):
        1 / 0  # noqa: B018
    assert [(kept.name, kept.thread) for kept in recorder.stop()] == [
        ("reward", "judge"),
        ("generate", "MainThread"),
    ]
