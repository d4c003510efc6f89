"""A run whose adapters learn: rollouts, a reference, checkpoints and exports, from the command line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import plain_adapters
from tests.e2e.conftest import metrics_of
from tests.e2e.test_backends import COMPARED, run_body, steps_of
from tests.e2e.test_loop import assert_memory_as_predicted
from tests.ranks import run_ranks

OPTIONS = (
    "model.lora.rank=8",
    "model.lora.targets=[linear_qkv,down_proj]",
    "parallel.tensor=2",
    "algorithm.kl.coef=0.1",
    "algorithm.ema_beta=0.5",
    "checkpoint.every=1",
)
OPTIONS_OF = {
    "megatron": (),
    "fsdp": (
        "backend=fsdp",
        "parallel.tensor=1",
        "model.lora.targets=[q_proj,k_proj,v_proj,down_proj]",
        "model.lora.dropout=0.1",
        "trainer.offload=true",
    ),
}


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_of_adapters_learns_exports_and_goes_on_as_if_it_had_not_ended(
    backend: str, arithmetic: Path, tmp_path: Path
) -> None:
    config = arithmetic / "run.yaml"
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    for output, steps in ((whole, 3), (ended, 2), (ended, 3)):
        given = (
            f"trainer.output={output}",
            f"trainer.steps={steps}",
            *OPTIONS,
            *OPTIONS_OF[backend],
        )
        run_ranks(2, run_body, config, backend, *given, timeout=200)
    wanted, seen = steps_of(whole), steps_of(ended)
    assert [line["step"] for line in seen] == [line["step"] for line in wanted]
    for line, expected in zip(seen, wanted, strict=True):
        assert {name: line[name] for name in COMPARED} == {
            name: expected[name] for name in COMPARED
        }
        assert_memory_as_predicted(line)
    assert wanted[0]["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert wanted[-1]["reference_kl"] > 1e-6, "the reference learnt as well, or nothing did"
    assert max(line["logprob_gap_max"] for line in wanted) < 1e-4
    start = load_file(arithmetic / "model" / "model.safetensors")
    for folder in ("policy", "policy_ema"):
        merged = load_file(next((whole / folder).glob("*.safetensors")))
        by_hand = plain_adapters.merged_by_hand(arithmetic / "model", whole / f"{folder}_adapter")
        for name, tensor in by_hand.items():
            torch.testing.assert_close(merged[name], tensor.float(), atol=1e-6, rtol=1e-5)
            learnt = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "down_proj")
            assert torch.equal(merged[name], start[name]) != learnt, name


def test_a_run_that_pushes_adapters_as_adapters_has_the_gap_and_the_numbers_of_one_that_merges_them(
    arithmetic: Path, tmp_path: Path
) -> None:
    """In float32, where merging loses nothing; with an evaluation, an interrupted run and a resume."""
    config = arithmetic / "run.yaml"
    told = {}
    for push, ends in (("merged", (3,)), ("adapters", (2, 3))):
        output = tmp_path / push
        for steps in ends:
            given = (f"trainer.output={output}", f"trainer.steps={steps}", *OPTIONS)
            engine = ("rollout.engine=vllm", "rollout.cpu_cache_gib=0.05")
            chosen = (*given, *engine, f"model.lora.push={push}")
            if push == "adapters":
                chosen = (*chosen, "model.lora.evaluated={base: ''}")
            run_ranks(2, run_body, config, "megatron", *chosen, timeout=300)
        told[push] = steps_of(output)
    assert max(line["logprob_gap_max"] for line in told["adapters"]) < 1e-4
    first, *_ = [line for line in metrics_of(tmp_path / "merged") if "eval_exact_match" in line]
    evaluated = [line for line in metrics_of(tmp_path / "adapters") if "eval_exact_match" in line]
    assert evaluated
    for line in evaluated:  # fresh adapters change nothing
        assert line["eval_base_exact_match"] == first["eval_exact_match"]
    for line, expected in zip(told["adapters"], told["merged"], strict=True):
        assert line["push_adapter_bytes"] < line["push_bytes"]
        assert_memory_as_predicted(line)
        for name in ("reward", "response_length", "loss", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_servers_that_take_adapters_give_the_run_of_an_engine_that_takes_merged_weights(
    arithmetic: Path, tmp_path: Path
) -> None:
    config, told = arithmetic / "run.yaml", {}
    engine = ("rollout.engine=vllm", "rollout.cpu_cache_gib=0.05", "rollout.max_batch=8")
    served = ("strategy=separate", "model.lora.push=adapters")
    for name, chosen in (("merged", ()), ("served", served)):
        output = tmp_path / name
        given = (f"trainer.output={output}", "trainer.steps=3", *OPTIONS, *engine, *chosen)
        run_ranks(2, run_body, config, "megatron", *given, timeout=300)
        told[name] = steps_of(output)
    for line, expected in zip(told["served"], told["merged"], strict=True):
        assert line["push_bytes"] == line["push_adapter_bytes"] > 0, "the model was sent again"
        assert line["logprob_gap_max"] < 1e-4
        for name in ("reward", "response_length", "loss", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
