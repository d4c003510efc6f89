import pytest

from rftmega.device.spans import recorder
from rftmega.strategy.colocated import _with_counts
from rftmega.trainer.journal import Journal


def test_an_optimizer_step_that_was_done_before_a_resume_is_counted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or padding and the pipeline's bubble would be missing in that step's metrics."""
    monkeypatch.setattr(recorder, "measuring", True)

    def step() -> dict[str, float]:
        recorder.count("tokens", 30)
        recorder.count("bubble", 2)
        return {"loss": 0.5}

    first, again = Journal(), Journal()
    recorder.take()
    recorder.count("tokens", 7)
    assert _with_counts(lambda work: first("a step", work))(step) == {"loss": 0.5}
    assert recorder.take() == {"tokens": 37, "bubble": 2}
    again.load_state(first.state())
    assert _with_counts(lambda work: again("a step", work))(step) == {"loss": 0.5}
    assert {name: count for name, count in recorder.take().items() if count} == {"tokens": 30, "bubble": 2}
