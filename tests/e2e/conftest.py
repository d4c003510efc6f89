"""A tiny arithmetic world on disk, and the real command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.warm_command import is_alike, run_warm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples/arithmetic"))
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    write_arithmetic(folder)
    return folder


def write_arithmetic(folder: Path) -> None:
    """model/ (random Qwen3 of 4 layers with the demo's tokenizer), train.jsonl, eval.jsonl,
    pairs.jsonl (the right sum and the next number); run.yaml learns from rewards, given.yaml from
    what is given.
    """
    import make_data
    import warm_start

    from tests.tiny_models import save_tiny

    make_data.write(folder)
    (folder / "eval.jsonl").write_text(
        "\n".join((folder / "eval.jsonl").read_text().splitlines()[:8])
    )
    encode = warm_start.tokenizer()
    save_tiny(
        folder / "model",
        "qwen3",
        vocab_size=len(warm_start.SYMBOLS),
        eos_token_id=encode.eos_token_id,
    )
    encode.save_pretrained(folder / "model")
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    pairs = [
        {
            **{"prompt": r["prompt"], "chosen": r["label"], "rejected": str(int(r["label"]) + 1)},
            **{"response_0": str(int(r["label"]) + 1), "response_1": r["label"]},
            **{"safer_response_id": 1, "is_response_0_safe": False, "is_response_1_safe": True},
        }
        for r in records
    ]
    for name, part in (("pairs", pairs[:-16]), ("held_out_pairs", pairs[-16:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    (folder / "given.yaml").write_text(f"""
model: {{path: {folder / "model"}}}
data: {{train: {folder / "train.jsonl"}, eval: {folder / "eval.jsonl"}}}
rollout: {{max_prompt_tokens: 8, max_response_tokens: 6}}
optimizer: {{learning_rate: 1.0e-3, epsilon: 1.0e-4}}
algorithm: {{updates_per_epoch: 2}}
trainer: {{steps: 3, prompts_per_step: 8, max_tokens_per_micro_batch: 64, output: {folder / "out"}}}
""")
    (folder / "run.yaml").write_text(f"""
model: {{path: {folder / "model"}}}
data: {{train: {folder / "train.jsonl"}, eval: {folder / "eval.jsonl"}}}
rollout: {{engine: scripted, samples_per_prompt: 4, max_prompt_tokens: 8, max_response_tokens: 6}}
reward: {{format: 1.0, format_pattern: ".*[0-4]"}}
optimizer: {{learning_rate: 1.0e-3, epsilon: 1.0e-4}}
algorithm: {{kl: {{coef: 0.1}}, entropy_coef: 0.05, updates_per_epoch: 2}}
trainer: {{steps: 3, prompts_per_step: 8, max_tokens_per_micro_batch: 64, export: false, output: {folder / "out"}}}
""")


def train_rl(
    *arguments: object, timeout: float = 240, planted: str = ""
) -> subprocess.CompletedProcess[str]:
    """The program with these arguments, as a user would start it; with a fault of `planted.py` in
    its ranks.

    Forked from a process that has imported its modules, where that makes no difference.
    """
    if not planted and is_alike(dict(os.environ)):
        return run_warm(
            ROOT / "train_rl.py", list(map(str, arguments)), folder=ROOT, timeout=timeout
        )
    program = ["-m", "tests.e2e.planted"] if planted else [str(ROOT / "train_rl.py")]
    command, environment = (
        [sys.executable, *program, *map(str, arguments)],
        os.environ | {"PLANTED": planted},
    )
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def several_runs(command_lines: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Train with one command line after the other, in one process."""
    return run_warm(
        ROOT / "tests/e2e/several_runs.py",
        [json.dumps(command_lines)],
        folder=ROOT,
        timeout=900,
        path=ROOT,
    )


@pytest.fixture
def train() -> Run:
    """`train_rl`."""
    return train_rl


def metrics_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


# What is of the machine and not of the run.
UNLIKE = ("time", "seconds", "per_second", "work_", "memory_", "tflops", "mfu", "pipeline_idle",
          "server_", "servers_")  # fmt: skip


def numbers_of(output: Path) -> list[dict[str, Any]]:
    """Metrics that a run which is repeated gives again."""
    return [
        {name: x for name, x in line.items() if not any(word in name for word in UNLIKE)}
        for line in metrics_of(output)
    ]
