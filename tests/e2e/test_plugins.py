"""A user's own parts in a run of several processes, which read the user's file each."""

import gzip
import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Run, metrics_of
from tests.unit.config.test_plugins import PARTS


@pytest.mark.ranks
def test_ranks_learn_by_parts_of_a_users_own_and_go_on_from_a_checkpoint(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    (tmp_path / "my_parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(
        f"base: {arithmetic / 'run.yaml'}\n"
        f"plugins: [{tmp_path / 'my_parts.py'}]\n"
        "algorithm: {advantage: {type: scaled, factor: 3}, policy_loss: square}\n"
        "reward: {custom: {brevity: {weight: 1}}}\n"
    )
    output = tmp_path / "out"
    given = [
        tmp_path / "run.yaml",
        "--processes",
        2,
        "parallel.tensor=2",
        "checkpoint.every=1",
        f"trainer.output={output}",
    ]
    first = train(*given, "trainer.steps=1", "data.eval=")
    assert first.returncode == 0, first.stdout + first.stderr
    again = train(*given, "trainer.steps=2", "data.eval=", "algorithm.advantage.factor=2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "algorithm.advantage.factor: 3.0 -> 2.0" in again.stdout + again.stderr
    steps = [step for step in metrics_of(output) if "reward_brevity" in step]
    assert len(steps) == 2


TALK = """
from dataclasses import dataclass
from typing import Literal

import torch

from rftmega.config.options.bounds import Count
from rftmega.config.options.parts import EnvironmentPart, ImportanceSampling, implements
from rftmega.core.types import Trajectory


@dataclass(frozen=True)
class Tool(EnvironmentPart):
    \"\"\"Two answers, and a word of a tool between them.\"\"\"

    type: Literal["tool"] = "tool"
    word: str = "7"


@implements(Tool)
class ToolEnvironment:
    def __init__(self, options, tokenizer):
        self.reply = tuple(tokenizer.encode_reply(options.word))

    async def run(self, task, model):
        first = await model.generate(task.token_ids)
        second = await model.generate((*task.token_ids, *first.token_ids, *self.reply))
        return [Trajectory.of(task.token_ids, first, self.reply, second)]


@dataclass(frozen=True)
class Halved(ImportanceSampling):
    type: Literal["halved"] = "halved"
    parts: Count = 2


@implements(Halved)
def halved(log_ratio, options):
    return torch.full_like(log_ratio, 1 / options.parts)
"""


@pytest.mark.ranks
def test_an_environment_and_an_importance_weight_of_a_users_own_are_trained_from(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    (tmp_path / "my_tool.py").write_text(TALK)
    (tmp_path / "run.yaml").write_text(
        f"base: {arithmetic / 'run.yaml'}\n"
        f"plugins: [{tmp_path / 'my_tool.py'}]\n"
        "environment: {type: tool, word: '34'}\n"
        "algorithm: {importance_sampling: {type: halved}, kl: {coef: 0}, entropy_coef: 0, updates_per_epoch: 1}\n"
        "rollout: {engine: transformers, max_prompt_tokens: 20, max_response_tokens: 4}\n"
        "trainer: {trajectories: 1}\n"
    )
    found = {}
    for name, parts in (("two", 2), ("four", 4)):
        output = tmp_path / name
        ran = train(
            tmp_path / "run.yaml",
            "--processes",
            2,
            "trainer.steps=1",
            "data.eval=",
            f"algorithm.importance_sampling.parts={parts}",
            f"trainer.output={output}",
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        (found[name],) = [step for step in metrics_of(output) if "loss" in step]
        with gzip.open(output / "trajectories/step_000001.jsonl.gz") as file:
            samples = [json.loads(line) for line in file]
        assert samples
        for sample in samples:
            tokens = sample["tokens"]
            first = tokens["chosen"].index(False)
            assert 1 <= first <= 4
            assert tokens["chosen"].count(False) == len(tokens["id"]) - sum(tokens["chosen"])
            said = [
                text for text, own in zip(tokens["text"], tokens["chosen"], strict=True) if not own
            ]
            assert "".join(said) == "34"
            assert tokens["advantage"][first] is None
    assert found["two"]["grad_norm"] > 0
    assert abs(found["four"]["grad_norm"] - found["two"]["grad_norm"] / 2) < 1e-4
