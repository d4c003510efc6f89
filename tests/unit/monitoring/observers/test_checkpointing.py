"""A run that is stopped and goes on is the run that nothing stopped."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.checkpoints.state_split import KEY, joined, put_together, taken_apart
from rftmega.config import load
from rftmega.core.errors import OutputError
from rftmega.core.types import Prompt
from rftmega.data.sampler import PromptOrder
from rftmega.monitoring.observers.checkpointing import Checkpointing, restore
from rftmega.monitoring.observers.metric_writers import JSONLines, TensorBoard
from rftmega.monitoring.observers.observer import AtEnd, Observer
from rftmega.trainer import Algorithm, PPOTrainer
from rftmega.trainer.ppo import StepSampling
from tests.unit.trainer.test_step import Bigrams, likes_seven

CONFIG = """
model: {path: nowhere}
algorithm: {kl: {coef: 0.1, target: 0.01, horizon: 10}}
reward: {shaping: {normalise: true}}
"""


class Kept:
    """Checkpoints in memory: states as text, weights as a copy."""

    def __init__(self, policy: Bigrams):
        self.policy, self.waited = policy, 0
        self.saved: dict[int, tuple[str, torch.Tensor]] = {}

    def save(self, state: dict[str, Any], *, step: int) -> None:
        self.saved[step] = written(state), self.policy.table.detach().clone()

    def wait(self) -> None:
        self.waited += 1


def written(state: Any) -> str:
    """As a checkpoint has it, the tensors too: numbers of float64 and less are exact as JSON has
    them.
    """
    said, tensors = taken_apart(state)
    return json.dumps([said, {key: tensor.tolist() for key, tensor in joined(tensors).items()}])


def read(text: str) -> Any:
    said, tensors = json.loads(text)
    return put_together(
        said, lambda key: torch.tensor(tensors[key], dtype=getattr(torch, key.removeprefix(KEY)))
    )


class Run:
    def __init__(self, folder: Path, *, every: int, stop_after: int = 0):
        (folder / "run.yaml").write_text(CONFIG)
        self.exported: list[int] = []
        self.policy = Bigrams()
        self.kept = Kept(self.policy)
        self.order = PromptOrder([Prompt((1, i)) for i in range(5)], batch_size=2, seed=0)
        algorithm = Algorithm(load(folder / "run.yaml"))
        parts: dict[str, Any] = {"data": self.order}
        self.trainer = PPOTrainer(
            engine=self.policy,
            weights=self.policy,
            reward=likes_seven,
            maker=algorithm.maker(self.policy),
            learner=algorithm.learner(self.policy),
            sampling=StepSampling(8, 1.0, seed=0),
            callbacks=[
                JSONLines(folder / "metrics.jsonl"),
                AtEnd(lambda: self.exported.append(self.trainer.step)),
                Checkpointing(self.kept, parts, every=every, last=7),
            ],
            stop=lambda: self.trainer.step == stop_after,
        )
        parts["trainer"] = self.trainer
        self.parts = parts

    def go_on(self, saved: tuple[str, torch.Tensor]) -> "Run":
        restore(self.trainer, self.parts, read(saved[0]))
        self.policy.table.data.copy_(saved[1])
        return self

    def fit(self) -> "Run":
        self.trainer.fit(self.order, steps=7)
        return self


def lines(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if "seconds" not in name and name != "time"}
        for line in found
    ]


def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path: Path) -> None:
    (whole_folder := tmp_path / "whole").mkdir()
    whole = Run(whole_folder, every=3).fit()
    assert sorted(whole.kept.saved) == [3, 6, 7]
    expected = lines(whole_folder)
    assert [line["step"] for line in expected] == list(range(8))
    assert expected[-1]["kl_coef"] != expected[1]["kl_coef"], "nothing to restore"
    broken = tmp_path / "broken"
    broken.mkdir()
    first = Run(broken, every=3).fit()
    with (broken / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 8, "tim')  # killed while it wrote
    again = Run(broken, every=3).go_on(first.kept.saved[3]).fit()
    assert lines(broken) == expected
    left_out = (broken / "metrics.left_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in left_out[:-1]] == [4, 5, 6, 7] and left_out[
        -1
    ] == '{"step": 8, "tim'
    assert torch.equal(again.policy.table, whole.policy.table)
    assert written(again.trainer.state()) == written(whole.trainer.state())


def test_a_run_that_is_told_to_stop_saves_and_ends_without_an_export(tmp_path: Path) -> None:
    run = Run(tmp_path, every=100, stop_after=4).fit()
    assert (run.trainer.step, run.trainer.stopped, run.exported) == (4, True, [])
    assert list(run.kept.saved) == [4]
    assert run.kept.waited == 2, "when it was saved, before others end; and at the end"
    again = Run(tmp_path, every=100).go_on(run.kept.saved[4]).fit()
    assert (again.trainer.step, again.trainer.stopped, again.exported) == (7, False, [7])


def test_the_time_of_a_save_is_told_as_a_phase() -> None:
    told: list[str] = []
    listener = Observer()
    listener.on_phase = lambda trainer, name, seconds: told.append(name)  # type: ignore[method-assign]
    trainer = SimpleNamespace(step=2, stopped=False, callbacks=[listener])
    Checkpointing(Kept(Bigrams()), {}, every=2, last=9).on_step(trainer, {})
    assert told == ["checkpoint"]


BAD = {
    "half a line in the middle": b'{"step": 1, "rew{"step": 2}\n',
    "zeros in the middle": b"\0\0\0\n",
    "a line of something else": b"[1, 2]\n",
    "a line without a step": b'{"reward": 1}\n',
    "no text": b"\xff\xfe\n",
    "zeros at the end": bytes(300),
    "half a line at the end": b'{"step": 3, "tim',
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_line_of_metrics_is_told_and_kept_beside_and_the_run_goes_on(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, begin, rest = (
        tmp_path / "metrics.jsonl",
        b'{"step": 0}\n{"step": 1}\n',
        b'{"step": 2}\n{"step": 3}\n',
    )
    path.write_bytes(begin + BAD[what] + (rest if BAD[what].endswith(b"\n") else b""))
    after = [b'{"step": 3}'] if BAD[what].endswith(b"\n") else []
    resumed = SimpleNamespace(step=2, resumed=True)
    writer = JSONLines(path)
    with caplog.at_level(logging.WARNING):
        writer.on_start(resumed, {})
    writer.on_step(SimpleNamespace(step=3), {})
    writer.on_end(resumed)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == ([0, 1, 2, 3] if after else [0, 1, 3])
    assert (tmp_path / "metrics.left_out.jsonl").read_bytes() == b"".join(
        line + b"\n" for line in [*after, BAD[what].removesuffix(b"\n")]
    )
    assert f"{path}:3: is no line of metrics" in caplog.text


def test_what_is_left_out_is_on_the_disk_before_the_metrics_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 1}\n')
    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(OutputError, match="metrics.jsonl can't be written: died"):
        JSONLines(path).on_start(SimpleNamespace(step=0, resumed=True), {})
    assert path.read_text() == '{"step": 0}\n{"st\n{"step": 1}\n'
    assert (tmp_path / "metrics.left_out.jsonl").read_text() == '{"step": 1}\n{"st\n'


def dies(*_: object) -> None:
    raise OSError("died")


def test_a_run_that_begins_anew_keeps_what_an_earlier_one_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for attempt in range(3):
        writers = (JSONLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "tensorboard"))
        with caplog.at_level(logging.INFO):
            for writer in writers:
                writer.on_start(SimpleNamespace(step=0, resumed=False), {"attempt": attempt})
                writer.on_end(None)
    for file, attempt in (("metrics.1.jsonl", 0), ("metrics.2.jsonl", 1), ("metrics.jsonl", 2)):
        assert json.loads((tmp_path / file).read_text())["attempt"] == attempt
    assert [
        len(list((tmp_path / name).iterdir()))
        for name in ("tensorboard", "tensorboard.1", "tensorboard.2")
    ] == [1, 1, 1]
    assert (
        f"{tmp_path / 'metrics.jsonl'} is an earlier run's: it is metrics.1.jsonl now."
        in caplog.text
    )


@pytest.mark.parametrize("saves", ["on_step", "on_given_up"])
def test_metrics_are_on_the_disk_before_a_checkpoint_is_begun(
    saves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        told.append((path.name, path.stat().st_size if path.is_file() else 0))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    kept, writer = Kept(Bigrams()), JSONLines(tmp_path / "metrics.jsonl")
    kept.save = lambda state, *, step: told.append(("saved", step))  # type: ignore[method-assign]
    journal = SimpleNamespace(state=list, __len__=lambda: 1)
    trainer = SimpleNamespace(
        step=1, stopped=False, resumed=False, callbacks=[writer], journal=journal
    )
    saving = Checkpointing(kept, {}, every=1, last=9)
    writer.on_start(trainer, {})
    if saves == "on_step":
        saving.on_step(trainer, {})
    else:
        saving.on_given_up(trainer)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    writer.on_end(trainer)
    assert told[:2] == [("metrics.jsonl", size), (tmp_path.name, 0)]
    assert [name for name, _ in told[2:]] == ["saved"]
