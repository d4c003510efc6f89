"""Splits of devices between trainer and servers, against all pairs and a roofline by hand."""

import json
from pathlib import Path

import pytest

from rftmega.config import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.run.planning import engine
from rftmega.run.planning.fit import Machine
from rftmega.run.planning.memory import Budget
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.splits import best_of, bytes_under_way, chosen_schedule, splits_of
from rftmega.run.planning.times import Speeds
from rftmega.tools import plan

GB = 1e9
ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "examples/planning/qwen2.5-0.5b"
PROMPTS, SAMPLES, ASKED, COMPLETION = 48, 8, 256, 1024
SPEEDS = Speeds(989e12, 3350 * GB, 450 * GB, 50 * GB, 50 * GB, 8)


def config_of(*, ranks: int = 2, most: int = 2) -> RunConfig:
    config = RunConfig(
        strategy="separate",
        model=ModelConfig(path=str(FOLDER)),
        parallel=ParallelConfig(tensor=2, sequence=True),
        optimizer=OptimizerConfig(distributed=True),
        rollout=RolloutConfig(
            engine="vllm",
            tensor=ranks,
            samples_per_prompt=SAMPLES,
            max_prompt_tokens=ASKED,
            max_response_tokens=COMPLETION,
        ),
        trainer=TrainerConfig(prompts_per_step=PROMPTS, max_staleness=most, offload=False),
    )
    config.critic.parallel, config.critic.optimizer = config.parallel, config.optimizer
    return config


def machine(devices: int, speeds: Speeds = SPEEDS) -> Machine:
    return Machine(devices, Budget(80 * GB, 4 * GB), speeds)


@pytest.mark.parametrize("devices", [4, 7, 12])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_splits_are_all_pairs_that_add_up_and_the_recommended_one_is_the_least_of_them(
    devices: int, ranks: int
) -> None:
    config = config_of(ranks=ranks)
    splits, _ = splits_of(models_of(config), config, machine(devices), mean_length=0.5)
    pairs = [
        (trainers, servers)
        for trainers in range(1, devices + 1)
        for servers in range(1, devices + 1)
        if trainers + servers * ranks == devices and trainers % 2 == 0
    ]
    assert sorted((split.trainers, split.servers) for split in splits) == pairs
    if not splits:
        return
    for name in splits[0].steps:
        least = best_of(splits, name)
        assert all(least.steps[name] <= split.steps[name] for split in splits)
    for split in splits:
        both = (split.rollout, split.learning)
        assert split.steps["synchronous"] == pytest.approx(sum(both))
        assert split.steps["one ahead"] == max(both)


def test_the_seconds_of_a_split_are_those_of_its_own_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    common = [
        "examples/planning/llama-3-70b/run.yaml", "--gpus", "128", "--gpu-memory", "80", "--json", "strategy=separate",
        "trainer.max_staleness=3",
    ]  # fmt: skip
    assert plan.main([*common, "--splits", "--mean-length", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["trainers"], each["servers"]) for each in found["splits"]] == [
        (96, 4),
        (64, 8),
        (32, 12),
    ]
    for split in found["splits"][:2]:
        plan.main([*common, "--no-search", f"rollout.servers={split['servers']}"])
        phases = json.loads(capsys.readouterr().out)["seconds_at_least"]
        rollout = sum(phases.pop("rollout").values())
        learning = sum(sum(parts.values()) for parts in phases.values())
        assert split["rollout"] == pytest.approx(rollout)
        assert split["learning"] == pytest.approx(learning)
    assert found["schedule"] == "staleness 3" and "staleness 3" in found["recommended"]


def test_what_a_bound_gives_is_the_longest_of_update_work_and_the_longest_answer_over_its_steps() -> (
    None
):
    """Reading weights and caches is all that takes time, on one server of one device."""
    rate = 1e9
    config = config_of(ranks=1)
    config.rollout.max_batch = 1000
    speeds = Speeds(1e30, rate, 1e30, 1e30, 1e30, 8, token=0.0)
    models = models_of(config)
    (split,) = splits_of(models, config, machine(3, speeds), mean_length=0.25)[0]
    policy = models[POLICY]
    weights = engine.weight_bytes(policy, 1)
    of_token = engine.cache_bytes(policy.model, 1)
    completions = PROMPTS * SAMPLES
    mean = COMPLETION // 4
    for most in (1, 2, 4):
        together = min(completions * (most + 1), 1000)
        step = (weights + together * (ASKED + mean / 2) * of_token) / rate
        working = 0.0
        for _ in range(mean):
            working += step * completions / together
        expected = max(working, COMPLETION * step / (most + 1))
        assert split.steps[f"staleness {most}"] == pytest.approx(expected, rel=1e-9)
        assert bytes_under_way(config, most) == most * completions * (ASKED + COMPLETION) * 13
    alone = (weights + completions * (ASKED + mean / 2) * of_token) / rate
    assert split.rollout == pytest.approx(COMPLETION * alone, rel=1e-9)


def test_the_configs_own_schedule_is_what_is_recommended_for() -> None:
    config = config_of(most=3)
    assert chosen_schedule(config) == "staleness 3"
    config.rollout.ahead, config.trainer.max_staleness = 1, 1
    assert chosen_schedule(config) == "one ahead"
    config.rollout.ahead, config.trainer.max_staleness = 0, 0
    assert chosen_schedule(config) == "synchronous"


@pytest.mark.parametrize(
    ("gpus", "more", "complaint"),
    [
        ("36", ["strategy=separate"], "a multiple of parallel.tensor x pipeline x context = 32"),
        (
            "8",
            ["strategy=separate"],
            "takes rollout.tensor=8 of them, which leaves the trainer none",
        ),
        ("64", [], "--splits is of a run with strategy=separate, not colocated"),
        ("64", ["strategy=separate", "--mean-length", "0"], "--mean-length=0 is a share"),
    ],
)
def test_where_nothing_can_be_split_it_says_why(
    gpus: str,
    more: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    run = ["examples/planning/llama-3-70b/run.yaml", "--gpu-memory", "80", "--splits"]
    assert plan.main([*run, "--gpus", gpus, *more]) == 2
    assert complaint in capsys.readouterr().err


def test_the_table_has_a_line_a_split_and_marks_the_recommended_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = ["examples/planning/llama-3-70b/run.yaml", "--gpu-memory", "80", "--splits"]
    assert plan.main([*run, "--gpus", "128", "strategy=separate"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= plan.WIDTH
    lines = [line for line in said if " x 8 " in line]
    assert [line[:2] for line in lines] == ["* ", "  ", "  "]
    assert "rollout.servers=4, 96 devices for the trainer" in " ".join(said)
    assert "needs all processes of the trainer on one host" in " ".join(said)
