"""Runs of a mixture whose tokens go to the experts that the engine, or the scoring pass, chose."""

from pathlib import Path
from typing import Any

import pytest

from rftmega.config.load import load
from rftmega.core.errors import ConfigError
from rftmega.run.preflight import preflight
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


def of_engine(engine: str) -> tuple[str, ...]:
    return f"rollout.engine={engine}", "algorithm.importance_sampling=token"


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_in_float32_the_engines_routes_are_those_of_the_scoring_pass(
    engine: str, moe: Path, tmp_path: Path
) -> None:
    """Over two updates a step, of which the second one's router would choose otherwise."""
    given = (*of_engine(engine), "trainer.steps=2")
    whole = run(moe, tmp_path / "engine", *given, "rollout.router_replay=engine")
    for line in whole:
        assert line["routes_known"] == 1.0 and line["logprob_gap_max"] < 1e-4
    trainer = run(moe, tmp_path / "trainer", *given, "rollout.router_replay=trainer")
    assert all("routes_known" not in line for line in trainer)
    assert_same(trainer, whole)


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_run_that_replays_routes_goes_on_as_if_it_had_not_ended(
    engine: str, moe: Path, tmp_path: Path
) -> None:
    given = (*of_engine(engine), "rollout.router_replay=engine")
    whole = run(moe, tmp_path / "whole", *given)
    run(moe, tmp_path / "two", *given, "trainer.steps=2")
    assert_same(run(moe, tmp_path / "two", *given), whole)


def test_what_a_model_or_an_engine_can_not_replay_is_refused_by_name(
    moe: Path, arithmetic: Path
) -> None:
    def refusal(world: Path, *options: str) -> str:
        with pytest.raises(ConfigError) as caught:
            preflight(load(world / "run.yaml", options), 1)
        return str(caught.value)

    said = refusal(moe, "rollout.router_replay=engine", "backend=fsdp")
    assert "needs backend=megatron: routers of transformers take no routes" in said
    assert "scripted tells of no experts. Set it to trainer." in said
    dense = refusal(arithmetic, "rollout.router_replay=trainer")
    assert "rollout.router_replay=trainer: this model has no experts." in dense
    given = ("rollout.router_replay=engine", "rollout.engine=vllm", "strategy=separate")
    assert "vLLM's servers tell of experts on CUDA alone" in refusal(moe, *given)
