"""Runs of a mixture whose tokens go to the experts that the engine, or the scoring pass, chose."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import write_arithmetic
from tests.e2e.test_backends import COMPARED, run_body, steps_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

EP = ("parallel.expert=2", "parallel.recompute=full", "model.dtype=float32", "checkpoint.every=1")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic world with a random mixture of experts."""
    import warm_start

    folder = tmp_path_factory.mktemp("mixture")
    write_arithmetic(folder)
    encode = warm_start.tokenizer()
    save_tiny(
        folder / "model",
        "qwen3-moe",
        vocab_size=len(warm_start.SYMBOLS),
        eos_token_id=encode.eos_token_id,
    )
    return folder


def run(moe: Path, output: Path, *options: str, processes: int = 2) -> list[dict[str, Any]]:
    given = (f"trainer.output={output}", *EP, *options)
    run_ranks(processes, run_body, moe / "run.yaml", "megatron", *given, timeout=300)
    return steps_of(output)


def assert_same(seen: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in seen] == [line["step"] for line in wanted]
    for line, expected in zip(seen, wanted, strict=True):
        for name in COMPARED:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.ranks)])
def test_in_float32_the_engines_routes_are_those_of_the_scoring_pass(
    engine: str, moe: Path, tmp_path: Path
) -> None:
    """Over two updates a step, of which the second one's router would choose otherwise; stopped
    after two steps, and resumed.
    """
    rollout = (f"rollout.engine={engine}", "algorithm.importance_sampling=token")
    replays = "rollout.router_replay=engine"
    whole = run(moe, tmp_path / "engine", *rollout, replays)
    for line in whole:
        assert line["routes_known"] == 1.0 and line["logprob_gap_max"] < 1e-4
    trainer = run(moe, tmp_path / "trainer", *rollout, "rollout.router_replay=trainer")
    assert all("routes_known" not in line for line in trainer)
    assert_same(trainer, whole)
    run(moe, tmp_path / "two", *rollout, replays, "trainer.steps=2")
    assert_same(run(moe, tmp_path / "two", *rollout, replays), whole)


def test_what_a_model_or_an_engine_can_not_replay_is_refused_by_name(
    moe: Path, arithmetic: Path, tmp_path: Path
) -> None:
    from tests.e2e.conftest import train_rl

    said = train_rl(
        moe / "run.yaml", "rollout.router_replay=engine", "backend=fsdp", "--processes", "1"
    )
    assert said.returncode == 2
    assert "needs backend=megatron: routers of transformers take no routes" in said.stderr
    assert "scripted tells of no experts. Set it to trainer." in said.stderr
    dense = train_rl(arithmetic / "run.yaml", "rollout.router_replay=trainer", "--processes", "1")
    assert dense.returncode == 2
    assert "rollout.router_replay=trainer: this model has no experts." in dense.stderr
    servers = train_rl(
        moe / "run.yaml",
        "rollout.router_replay=engine",
        "rollout.engine=vllm",
        "strategy=separate",
        "--processes",
        "1",
    )
    assert servers.returncode == 2
    assert "vLLM's servers tell of experts on CUDA alone" in servers.stderr
