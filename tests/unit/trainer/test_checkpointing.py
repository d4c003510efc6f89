"""A run that is stopped and goes on is the run that nothing stopped."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.checkpoint.states import KEY, joined, put_together, taken_apart
from rftmega.config import load
from rftmega.data import PromptOrder
from rftmega.trainer import Algorithm, PPOTrainer
from rftmega.trainer.callbacks import AtEnd, JSONLines, lines_until
from rftmega.trainer.checkpointing import Checkpointing, resume
from rftmega.types import Prompt
from tests.unit.trainer.test_step import Bigrams, likes_seven

CONFIG = """
model: {path: nowhere}
algorithm: {reward_normalise: true, kl_coef: 0.1, kl_target: 0.01, kl_horizon: 10}
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
    """As a checkpoint has it, the tensors too: numbers of float64 and less are exact as JSON has them."""
    said, tensors = taken_apart(state)
    return json.dumps([said, {key: tensor.tolist() for key, tensor in joined(tensors).items()}])


def read(text: str) -> Any:
    said, tensors = json.loads(text)
    return put_together(said, lambda key: torch.tensor(tensors[key], dtype=getattr(torch, key.removeprefix(KEY))))


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
            samples_per_prompt=8,
            temperature=1.0,
            seed=0,
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
        resume(self.trainer, self.parts, read(saved[0]))
        self.policy.table.data.copy_(saved[1])
        return self

    def fit(self) -> "Run":
        self.trainer.fit(self.order, steps=7)
        return self


def lines(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "seconds" not in name and name != "time"} for line in found]


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
    assert torch.equal(again.policy.table, whole.policy.table)
    assert again.trainer.state() == whole.trainer.state()


def test_a_run_that_is_told_to_stop_saves_and_ends_without_an_export(tmp_path: Path) -> None:
    run = Run(tmp_path, every=100, stop_after=4).fit()
    assert (run.trainer.step, run.trainer.stopped, run.exported) == (4, True, [])
    assert list(run.kept.saved) == [4]
    assert run.kept.waited == 2, "when it was saved, before others end; and at the end"
    again = Run(tmp_path, every=100).go_on(run.kept.saved[4]).fit()
    assert (again.trainer.step, again.trainer.stopped, again.exported) == (7, False, [7])


def test_the_time_of_a_save_is_told_as_a_phase() -> None:
    told: list[str] = []
    listener = SimpleNamespace(on_phase=lambda trainer, name, seconds: told.append(name))
    trainer = SimpleNamespace(step=2, stopped=False, callbacks=[listener])
    Checkpointing(Kept(Bigrams()), {}, every=2, last=9).on_step(trainer, {})
    assert told == ["checkpoint"]


@pytest.mark.parametrize(("step", "kept"), [(0, 1), (1, 2), (5, 3)])
def test_only_whole_lines_of_the_steps_before_are_kept(step: int, kept: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert lines_until(path, step) == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3')
    assert len(lines_until(path, step)) == kept
