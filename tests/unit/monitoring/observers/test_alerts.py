"""Each alert is said where it should be, in words, and not again at every step."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from rftmega.monitoring.observers.alerts import AGAIN, ALERTS, Alerts
from rftmega.monitoring.observers.progress import status
from tests.e2e.conftest import ROOT

WELL = {
    "reward": 0.5, "varied": 0.8, "entropy": 1.0, "truncated": 0.1, "logprob_gap_mean": 2e-5,
    "clip_fraction": 0.1, "seconds_rollout": 10.0, "work_rollout": 9.0,
}  # fmt: skip
ILL = {  # what makes each of them speak: metric, value
    "Rewards all equal": ({"varied": 0.05}, "the completions of 95% of the prompts score alike"),
    "Entropy collapsing": ({"entropy": 0.1}, "entropy is 0.1 nats a token, from 1 in the first"),
    "Length at the cap": ({"truncated": 0.6}, "60% of the completions are cut off"),
    "Gap rising": ({"logprob_gap_mean": 2e-3}, "differ by 0.002 nats a token, from 2e-05"),
    "Clipped share": ({"clip_fraction": 0.5}, "takes the gradient of 50% of the tokens"),
    "Engine idle": ({"work_rollout": 2.0}, "engines generate in 20% of the rollout's 10 s"),
}
NOT_YET = {  # just on the other side of each bound
    "varied": 0.11, "entropy": 0.21, "truncated": 0.29, "logprob_gap_mean": 9e-5, "clip_fraction": 0.29,
    "work_rollout": 5.1,
}  # fmt: skip


def said(
    caplog: pytest.LogCaptureFixture,
    steps: list[dict[str, float]],
    *,
    first: int = 1,
    history: Path = Path("nowhere"),
) -> list[tuple[int, str]]:
    """Returns step and words of every alert."""
    alerts, found = Alerts(history), []
    alerts.on_start(SimpleNamespace(step=first - 1, resumed=first > 1), {})
    for step, metrics in enumerate(steps, first):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            alerts.on_step(SimpleNamespace(step=step), metrics)
        found += [(step, record.getMessage()) for record in caplog.records]
    return found


@pytest.mark.parametrize("name", ILL)
def test_it_is_said_once_when_it_holds_on_average_over_five_steps(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed, words = ILL[name]
    ((step, message),) = said(caplog, [WELL] * 20 + [WELL | changed] * 20)
    assert 20 < step <= 25
    assert message.startswith(f"{name} (docs/monitoring.md): ")
    ((_, message), *_) = said(caplog, [WELL] * 5 + [WELL | changed] * (AGAIN + 10))
    settled = [text for _, text in said(caplog, [WELL] * 5 + [WELL | changed] * (AGAIN + 10))]
    assert len(settled) == 2, "once more after a hundred steps"
    assert words in settled[1]


def test_a_run_that_goes_well_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, [WELL] * 10 + [WELL | NOT_YET] * 50) == []
    assert said(caplog, [{"eval_accuracy": 0.0}, *[WELL] * 10]) == []
    assert said(caplog, [{"loss": 1.0}] * 10) == [], "a task without rollouts"


def test_one_odd_step_is_not_enough(caplog: pytest.LogCaptureFixture) -> None:
    odd = WELL | {"clip_fraction": 0.9, "truncated": 0.9, "work_rollout": 1.0}
    assert said(caplog, [*[WELL] * 10, odd, *[WELL] * 10]) == []


def test_a_resumed_run_is_compared_with_its_first_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = tmp_path / "metrics.jsonl"
    lines: list[dict[str, float | None]] = [{"step": 0, "eval_reward": 0.1}]
    lines += [{"step": step, **WELL, "loss": None} for step in range(1, 9)]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    low = WELL | {"entropy": 0.1}
    assert said(caplog, [low] * 20) == [], "they are its first steps"
    ((_, message),) = said(caplog, [low] * 20, first=9, history=history)
    assert message.startswith("Entropy collapsing")


def test_every_alert_has_its_paragraph_in_the_docs() -> None:
    text = (ROOT / "docs/monitoring.md").read_text()
    for alert in ALERTS:
        assert f"- **{alert.name}**: " in text
    assert {alert.name for alert in ALERTS} == ILL.keys()


def test_the_line_of_a_step_says_what_was_trained_and_how_fast() -> None:
    metrics = {
        "reward": 0.41, "spread": 0.3, "response_length": 182.4, "generated_tokens": 6000.0, "seconds_rollout": 3.0,
        "seconds_update": 2.0, "loss": 0.01, "reference_kl": 0.002, "logprob_gap_max": 1.5e-6, "push_bytes": 7.0,
    }  # fmt: skip
    assert status(metrics) == (
        "reward 0.41 ±0.3, length 182, KL 0.002, loss 0.01, gap 1.5e-06, 1.2e+03 tokens/s, 5 s/step"
    )
    assert status({"loss": 0.5, "grad_norm": 1.0}) == "loss 0.5, grad norm 1"
