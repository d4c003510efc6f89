"""The progress of a run fits where it is shown."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from rftmega.monitoring.observers.progress import BAR, Progress, fitting, parts, room_of

STEP = {
    "reward": 0.41, "spread": 0.3, "response_length": 182.4, "generated_tokens": 6000.0, "seconds_rollout": 3.0,
    "seconds_update": 2.0, "loss": 0.01, "reference_kl": 0.002, "logprob_gap_max": 1.5e-6, "entropy": 0.5,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_the_bar_fits_the_terminal_and_drops_whole_metrics_from_the_right(columns: int) -> None:
    bar = tqdm(total=1000, initial=42, ncols=columns, bar_format=BAR, file=io.StringIO())
    bar.set_postfix_str(fitting(parts(STEP), room_of(bar)))
    line = str(bar)
    assert len(line) < columns
    shown = line.split(", ")[1:]
    assert shown == parts(STEP)[: len(shown)]
    left = parts(STEP)[len(shown) :]
    assert not left or len(line) + len(f", {left[0]}") >= columns
    bar.close()


def test_a_log_message_gets_a_line_of_its_own_above_the_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(terminal)])
    bar = Progress(3)
    bar.on_start(SimpleNamespace(step=0), {})
    bar.on_step(SimpleNamespace(step=1), STEP)
    logging.getLogger("rftmega.a").warning("look here")
    bar.on_end(None)
    written = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert "look here" in written
    assert [type(handler) for handler in logging.root.handlers] == [logging.StreamHandler]


def test_a_log_file_has_a_line_for_each_step_and_no_bar(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    update = {"clip_fraction": 0.25, "learning_rate": 1e-6, "truncated": 0.5}
    rewards = {"reward_mine": 0.2, "reward_math": 0.6, "reward_math_undecided": 0.0}
    memory = {"memory_mib_rollout": 300.0, "memory_mib_update": 450.0}
    bar = Progress(3, seen=lambda: 1.25)
    bar.on_start(SimpleNamespace(step=0), {})
    bar.on_step(SimpleNamespace(step=2), STEP | update | rewards | memory)
    bar.on_end(None)
    assert caplog.messages == [
        "step 2/3: reward 0.41 (mine 0.2, math 0.6), reward_std 0.3, KL 0.002, clipped 0.25, entropy 0.5, loss 0.01, "
        "learning rate 1e-06, gap 1.5e-06, length 182, cut off 0.5, memory 450 MiB, rollout 3 s, update 2 s, data 125.0%"
    ]
    assert capsys.readouterr().err == ""
