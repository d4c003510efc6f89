"""The real program, from its command line to the exported model."""

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.conftest import ROOT, Run, metrics_of, several_runs

# The program as often as asked: its imports, and those of the server that ranks are forked from,
# are most of a start.
LAYOUTS = {
    "TP2 x PP2": (2, 2, 4),
    "DP4": (1, 1, 4),
    "TP4": (4, 1, 4),
    "PP4": (1, 4, 4),
    "one process": (1, 1, 1),
}


def run_all(
    config: Path, runs: dict[str, list[str]], folder: Path
) -> dict[str, list[dict[str, float]]]:
    """Metrics of every run's steps, by its name."""
    given = [
        [str(config), f"trainer.output={folder / name}", *options] for name, options in runs.items()
    ]
    done = several_runs(given)
    assert done.returncode == 0, done.stderr
    return {name: metrics_of(folder / name)[1:] for name in runs}


def assert_memory_as_predicted(step: dict[str, float]) -> None:
    """Of every phase and kind, within a tenth."""
    predicted = {
        name.removesuffix("_predicted"): value
        for name, value in step.items()
        if name.endswith("_predicted")
    }
    assert {
        "memory_score_parameters_mib",
        "memory_update_adam_mib",
        "memory_push_parameters_mib",
    } <= predicted.keys()
    for name, value in predicted.items():
        assert step[name] == pytest.approx(value, rel=0.1), name


def undocumented(seen: dict[str, list[dict[str, float]]]) -> set[str]:
    """Metrics that no item of the list in docs/monitoring.md names; <part> there stands for any word."""
    _, metrics = (ROOT / "docs/monitoring.md").read_text().split("## Metrics\n")
    items = metrics.split("\n## ")[0].split("\n- ")
    rows = [item.partition(": ")[0] for item in items if item.startswith("`")]
    patterns = [
        re.sub("<[a-z]+>", "[a-z0-9_]+", name)
        for row in rows
        for name in re.findall("`([^`]+)`", row)
    ]
    known = re.compile(f"(critic_)?({'|'.join(patterns)})")
    return {
        name
        for steps in seen.values()
        for step in steps
        for name in step.keys() - {"step", "time"}
        if not known.fullmatch(name)
    }


def check_timeline(path: Path, stages: int) -> None:
    """Two steps of two processes a stage: their phases in order, and what they did within them."""
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        f"rank {rank}: tensor {rank % 2}, stage {rank // 2}, data 0" for rank in range(2 * stages)
    ]
    phases = [
        f"{phase} {step}" for step in (2, 3) for phase in ("rollout", "score", "update", "push")
    ]
    for rank in range(2 * stages):
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"], e["name"])
            for e in events
            if e["ph"] == "X" and e["pid"] == rank
        )
        names = [name for _, _, name in spans]
        assert [name for name in names if name[-1].isdigit()] == phases
        assert {
            "generate",
            "schedule",
            "forward",
            "backward",
            "offload",
            "onload",
            "load weights",
            "receive weights",
        } <= set(names)
        if stages > 1:
            assert ("forward-send" if rank < 2 else "forward-recv") in names
        (begin, end), *_ = [(begin, end) for begin, end, name in spans if name == "update 2"]
        within = [name for ts, until, name in spans if begin - 1000 < ts and until < end + 1000]
        assert within.count("forward") == within.count("backward") > 0
    assert any(e["name"] == "reward" for e in events)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.ranks)])
def test_the_first_steps_agree_between_layouts(
    every: bool, arithmetic: Path, tmp_path: Path
) -> None:
    """Loss, gradient norm and reward of three steps, to 5 significant digits, with the scripted
    engine: of PPO, and of the default recipe in `every` layout.

    The entropy bonus keeps the loss away from 0, where a surrogate's terms cancel and digits mean
    nothing.
    """
    ppo = [
        "algorithm.recipe=ppo",
        "algorithm.ema_beta=0.5",
        "trainer.export=true",
        "critic.optimizer.learning_rate=1e-3",
    ]
    runs = {"PPO, one process": [*ppo, "--processes", "1"]}
    layouts = [
        "parallel.tensor=2",
        "critic.parallel.tensor=1",
        "critic.parallel.pipeline=2",
        "critic.parallel.virtual_pipeline=2",
    ]
    runs["PPO, TP2 beside PP2 x VPP2"] = [
        *ppo,
        *layouts,
        "critic.optimizer.distributed=true",
        "logging.timeline=[2,3]",
        "--processes",
        "2",
    ]
    stages = {"PPO, TP2 beside PP2 x VPP2": 1}
    if every:
        stages["TP2 x PP2"] = 2
        runs |= {
            name: [
                f"parallel.tensor={tensor}",
                f"parallel.pipeline={pipeline}",
                "--processes",
                str(processes),
                *(["logging.timeline=[2,3]"] if name in stages else []),
            ]
            for name, (tensor, pipeline, processes) in LAYOUTS.items()
        }
    seen = run_all(arithmetic / "run.yaml", runs, tmp_path)
    assert undocumented(seen) == set()
    for name, number in stages.items():
        check_timeline(tmp_path / name / "timeline" / "steps_000002_000003.json", number)
    for name, steps in seen.items():
        with_critic = name.startswith("PPO")
        wanted = seen["PPO, one process" if with_critic else "one process"]
        assert len(steps) == 3
        assert len({step["reward"] for step in steps}) > 1, "nothing to compare"
        more = (
            ("critic_loss", "critic_grad_norm", "critic_value", "reference_kl")
            if with_critic
            else ()
        )
        for step, reference in zip(steps, wanted, strict=True):
            for metric in ("loss", "grad_norm", "reward", "kl", "entropy", *more):
                assert step[metric] == pytest.approx(reference[metric], rel=5e-6, abs=1e-9), (
                    name,
                    step["step"],
                    metric,
                )
            assert_memory_as_predicted(step)
    assert "memory_update_critic_adam_mib" in seen["PPO, TP2 beside PP2 x VPP2"][-1]
    if every:
        assert seen["TP2 x PP2"][-1]["memory_push_push_buffers_mib"] > 0
    assert all(step["grad_norm"] > 1e-3 for steps in seen.values() for step in steps)
    assert seen["PPO, one process"][-1]["critic_loss"] < seen["PPO, one process"][0]["critic_loss"]
    ppo_run = tmp_path / "PPO, TP2 beside PP2 x VPP2"
    start, end, average = (
        AutoModelForCausalLM.from_pretrained(folder).model.norm.weight.detach()
        for folder in (arithmetic / "model", ppo_run / "policy", ppo_run / "policy_ema")
    )
    assert 0 < (average - end).abs().sum() < (start - end).abs().sum(), "no average of the steps"


TWO_LAYOUTS = {
    "alone": ["--processes", "1"],
    "TP2 x PP2": ["parallel.tensor=2", "parallel.pipeline=2", "--processes", "4"],
}


def trained_alike(
    config: Path, options: list[str], judged: str, folder: Path
) -> dict[str, list[dict[str, float]]]:
    """Metrics of a run alone and of one in four processes, which agree."""
    seen = run_all(
        config, {layout: [*options, *chosen] for layout, chosen in TWO_LAYOUTS.items()}, folder
    )
    assert undocumented(seen) == set()
    alone, together = seen.values()
    for step, reference in zip(together, alone, strict=True):
        for metric in ("loss", "grad_norm"):
            assert step[metric] == pytest.approx(reference[metric], rel=5e-6), (
                step["step"],
                metric,
            )
    assert together[-1][judged] == pytest.approx(alone[-1][judged], rel=1e-4)
    assert alone[-1]["loss"] < alone[0]["loss"]
    return seen


@pytest.mark.ranks
def test_given_answers_are_trained_alike_under_two_layouts(
    arithmetic: Path, tmp_path: Path
) -> None:
    options = ["algorithm.task=sft", "data.response_key=label"]
    trained_alike(arithmetic / "given.yaml", options, "eval_cross_entropy", tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "TP2 x PP2" / "policy")
    assert policy.dtype == torch.float32


def margin_of(arithmetic: Path, folder: Path) -> float:
    """By how much chosen held-out responses score higher, as transformers computes it."""
    judge = AutoModelForSequenceClassification.from_pretrained(folder)
    assert judge.config.num_labels == 1
    encode = AutoTokenizer.from_pretrained(arithmetic / "model")
    margins = []
    for line in (arithmetic / "held_out_pairs.jsonl").read_text().splitlines():
        pair = json.loads(line)
        ids = [
            [*encode.encode(pair["prompt"] + pair[side]), encode.eos_token_id]
            for side in ("chosen", "rejected")
        ]
        chosen, rejected = (judge(torch.tensor([row])).logits[0, 0].item() for row in ids)
        margins.append(chosen - rejected)
    return sum(margins) / len(margins)


@pytest.mark.ranks
def test_preferences_are_trained_alike_under_two_layouts_and_then_judge_a_run(
    arithmetic: Path, tmp_path: Path
) -> None:
    data = [
        f"data.train={arithmetic / 'pairs.jsonl'}",
        f"data.eval={arithmetic / 'held_out_pairs.jsonl'}",
    ]
    seen = trained_alike(
        arithmetic / "given.yaml", ["algorithm.task=reward_model", *data], "eval_margin", tmp_path
    )
    margin = margin_of(arithmetic, tmp_path / "TP2 x PP2" / "reward_model")
    assert margin == pytest.approx(seen["alone"][-1]["eval_margin"], rel=1e-3)
    cost = ["algorithm.reward_model_loss=cost", "data.chosen_key=safer_response_id"]
    costs = run_all(
        arithmetic / "given.yaml", {"cost": ["algorithm.task=reward_model", *data, *cost]}, tmp_path
    )["cost"]
    assert costs[-1]["loss"] < costs[0]["loss"]
    margin = margin_of(arithmetic, tmp_path / "cost" / "reward_model")
    assert -margin == pytest.approx(costs[-1]["eval_margin"], rel=1e-3)
    assert 0 <= costs[-1]["eval_safety_accuracy"] <= 1
    assert undocumented({"cost": costs}) == set()
    rewarded = [
        "parallel.tensor=2",
        "reward.exact_match=0",
        "reward.format=0",
        "reward.format_pattern=",
        "reward.model=0.5",
        f"reward.model_path={tmp_path / 'alone' / 'reward_model'}",
        "reward.cost=0.25",
    ]
    path = f"reward.cost_path={tmp_path / 'cost' / 'reward_model'}"
    (step, *_) = run_all(
        arithmetic / "run.yaml", {"rl": [*rewarded, path, "--processes", "2"]}, tmp_path
    )["rl"]
    encode = AutoTokenizer.from_pretrained(arithmetic / "model")
    judge, counted = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / run / "reward_model")
        for run in ("alone", "cost")
    )
    written = (
        gzip.decompress((tmp_path / "rl" / "trajectories" / "step_000001.jsonl.gz").read_bytes())
        .decode()
        .splitlines()
    )
    scores = []
    for sample in map(json.loads, written):
        ids = [*encode.encode(sample["prompt"]), *sample["tokens"]["id"]]
        scores.append(judge(torch.tensor([ids])).logits[0, 0].item())
        assert sample["reward_parts"]["model"] == pytest.approx(scores[-1], abs=1e-5)
        harm = counted(torch.tensor([ids])).logits[0, 0].item()
        assert sample["reward_parts"]["cost"] == pytest.approx(harm, abs=1e-5)
        assert sample["reward"] == pytest.approx(0.5 * scores[-1] - 0.25 * harm, abs=1e-5)
    assert max(scores) - min(scores) > 1e-3, "nothing to compare"
    assert step["reward_model"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)


def test_with_vllm_the_engine_follows_the_trainer_and_the_export_is_a_model(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    done = train(
        arithmetic / "run.yaml", "rollout.engine=vllm", "rollout.cpu_cache_gib=0.05", "parallel.tensor=2", "--processes", 2,
        f"trainer.output={tmp_path}", "trainer.export=true", "optimizer.learning_rate=1e-2", "algorithm.updates_per_epoch=1",
        "trainer.steps=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path)
    first = steps[1]  # nothing has changed yet when its rollout is scored and learnt from
    assert abs(first["ppo_kl"]) < 1e-8
    assert first["kl"] < 1e-8
    assert first["reference_kl"] < 1e-8
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["token_mult_prob_error"] < 1.001
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["logprob_gap_max"] < 1e-4 for step in steps[1:])
    assert "eval_exact_match" in steps[0]
    assert "eval_exact_match" in steps[-1]
    names = [path.name for path in sorted((tmp_path / "evaluations").iterdir())]
    assert names == ["step_000000.jsonl.gz", "step_000002.jsonl.gz"]
    assert list((tmp_path / "tensorboard").iterdir())
    before, after = (
        AutoModelForCausalLM.from_pretrained(p) for p in (arithmetic / "model", tmp_path / "policy")
    )
    moved = [
        not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert all(moved), "a parameter never moved"
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").decode([5, 6]) == "34"


def test_dry_run_prints_layout_batch_and_parameters_and_starts_nothing(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    layout = ("parallel.tensor=2", "parallel.pipeline=2", f"trainer.output={tmp_path / 'out'}")
    done = train(arithmetic / "run.yaml", *layout, "--processes", 8, "--dry-run")
    assert done.returncode == 0, done.stderr
    for part in (
        "8 = TP2 x PP2 x DP2",
        "8 prompts x 4 completions = 32 rows",
        "rank 5: tensor 1, stage 1",
    ):
        assert part in done.stdout
    model = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in done.stdout
    assert not (tmp_path / "out").exists()


def test_help_explains_every_section(train: Run) -> None:
    done = train("--help")
    assert done.returncode == 0
    for part in (
        "parallel.tensor = 1",
        "rollout.temperature = 1.0",
        "--dry-run",
        "CONFIG [option=value ...]",
    ):
        assert part in done.stdout


@pytest.mark.ranks
def test_torchrun_starts_it_as_well_and_what_it_trained_from_is_written_once(
    arithmetic: Path, tmp_path: Path
) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "train_rl.py"),
    ]
    options = [
        str(arithmetic / "run.yaml"),
        "parallel.tensor=2",
        "trainer.steps=1",
        f"trainer.output={tmp_path}",
    ]
    done = subprocess.run(
        [*torchrun, *options], capture_output=True, text=True, check=False, timeout=240, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "TP2 x PP1 x DP1" in done.stdout
    metrics = metrics_of(tmp_path)
    assert [step["step"] for step in metrics] == [0, 1]
    (written,) = (tmp_path / "trajectories").glob("step_*")
    samples = [json.loads(line) for line in gzip.decompress(written.read_bytes()).splitlines()]
    assert len(samples) == 32
    assert sum(sample["reward"] for sample in samples) / 32 == pytest.approx(metrics[1]["reward"])
    gaps = [abs(gap) for sample in samples for gap in sample["tokens"]["gap"]]
    assert max(gaps) == pytest.approx(metrics[1]["logprob_gap_max"], rel=1e-3)
    entropies = [entropy for sample in samples for entropy in sample["tokens"]["entropy"]]
    assert sum(entropies) / len(entropies) == pytest.approx(metrics[1]["entropy"], rel=0.05), (
        "of two updates, the first's is this"
    )


@pytest.mark.ranks
def test_tasks_of_srun_that_know_nothing_of_each_other_are_refused(
    arithmetic: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        str(ROOT / "train_rl.py"),
        str(arithmetic / "run.yaml"),
        f"trainer.output={tmp_path / 'out'}",
    ]
    environment = os.environ | {"SLURM_STEP_NUM_TASKS": "4"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: srun started several tasks")
    assert not (tmp_path / "out").exists()


SEPARATE = (
    "strategy=separate",
    "rollout.engine=vllm",
    "rollout.cpu_cache_gib=0.05",
    "parallel.tensor=2",
    "--processes",
    2,
)


@pytest.mark.ranks
def test_with_two_servers_the_same_steps_give_the_same_numbers_as_with_engines_inside(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    seen = {}
    for name, options in {
        "separate": (*SEPARATE, "rollout.servers=2"),
        "colocated": SEPARATE[1:],
    }.items():
        done = train(
            arithmetic / "run.yaml",
            *options,
            f"trainer.output={tmp_path / name}",
            "optimizer.learning_rate=1e-2",
        )
        assert done.returncode == 0, done.stderr
        seen[name] = metrics_of(tmp_path / name)
    for ours, theirs in zip(seen["separate"][1:], seen["colocated"][1:], strict=True):
        assert ours["logprob_gap_max"] < 1e-5
        for metric in ("reward", "loss", "grad_norm"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4), (ours["step"], metric)


@pytest.mark.ranks
def test_servers_end_with_the_run_that_is_stopped(arithmetic: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "train_rl.py",
        str(arithmetic / "run.yaml"),
        *map(str, SEPARATE),
        f"trainer.output={tmp_path}",
    ]
    run = subprocess.Popen([*command, "trainer.steps=1000"], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    sessions = {
        session
        for session, line in processes()
        if b"api_server" in line and str(arithmetic).encode() in line
    }
    assert len(sessions) == 1
    assert len([session for session, _ in processes() if session in sessions]) > 2, (
        "a server has processes of its own"
    )
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 30
    while left := [line for session, line in processes() if session in sessions]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def processes() -> list[tuple[int, bytes]]:
    """(session, command line) of everything alive."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if line := file.read_bytes():
                found.append((os.getsid(int(file.parent.name)), line))
    return found


@pytest.mark.ranks
def test_a_step_whose_answers_are_all_of_earlier_weights_has_its_gap_measured(
    arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    """On colocated vLLM, which has slept by then: it gets the weights again."""
    done = train(
        *(arithmetic / "run.yaml", "--processes", 2, "parallel.pipeline=2", "rollout.engine=vllm"),
        *("rollout.cpu_cache_gib=0.05", "trainer.max_staleness=2", "trainer.steps=4", "data.eval="),
        *("algorithm.importance_sampling=token", f"trainer.output={tmp_path}"),
    )
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path)[1:]
    assert any(step["staleness_0"] == 0 for step in steps if step["staleness"] > 0)
    assert all(step["staleness_max"] <= 2 and step["logprob_gap_max"] < 1e-4 for step in steps)
