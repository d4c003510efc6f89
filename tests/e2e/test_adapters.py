"""A run whose adapters learn: rollouts, a reference, checkpoints and exports, from the command line."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rftmega.checkpoints.training_files import TrainingReader
from tests import plain_adapters
from tests.e2e.conftest import metrics_of, train_rl
from tests.e2e.test_backends import COMPARED, run_body, steps_of
from tests.e2e.test_loop import assert_memory_as_predicted
from tests.ranks import VLLM, run_ranks

OPTIONS = (
    "model.lora.rank=8",
    "model.lora.targets=[linear_qkv,down_proj]",
    "parallel.tensor=2",
    "algorithm.kl.coef=0.1",
    "algorithm.ema_beta=0.5",
    "checkpoint.every=1",
)
PPO = (*OPTIONS, "algorithm.advantage=gae", "model.lora.dropout=0.1")
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


@pytest.mark.ranks
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
    assert_learnt_beside_the_reference(wanted)
    assert_exports_the_products(arithmetic / "model", whole)


def assert_learnt_beside_the_reference(steps: list[dict[str, Any]]) -> None:
    assert steps[0]["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["reference_kl"] > 1e-6, "the reference learnt as well, or nothing did"
    assert max(line["logprob_gap_max"] for line in steps) < 1e-4


def assert_exports_the_products(model: Path, output: Path) -> None:
    """Of the policy and of its average: each weight is the model's own and the product of its pair."""
    start = load_file(model / "model.safetensors")
    for folder in ("policy", "policy_ema"):
        merged = load_file(next((output / folder).glob("*.safetensors")))
        by_hand = plain_adapters.merged_by_hand(model, output / f"{folder}_adapter")
        for name, tensor in by_hand.items():
            torch.testing.assert_close(merged[name], tensor.float(), atol=1e-6, rtol=1e-5)
            trained = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "down_proj")
            assert torch.equal(merged[name], start[name]) != trained, name


@pytest.mark.ranks
@pytest.mark.parametrize("ends", [(2,), (2, 3)])
def test_a_run_that_pushes_adapters_as_adapters_has_the_gap_and_the_numbers_of_one_that_merges_them(
    ends: tuple[int, ...], arithmetic: Path, tmp_path: Path
) -> None:
    """In float32, where merging loses nothing; with an evaluation, and a run that is interrupted."""
    config = arithmetic / "run.yaml"
    engine = ("rollout.engine=vllm", "rollout.cpu_cache_gib=0.05")
    told = {}
    for push, each in (("merged", ends[-1:]), ("adapters", ends)):
        output = tmp_path / push
        for steps in each:
            given = (f"trainer.output={output}", f"trainer.steps={steps}", *OPTIONS)
            chosen = (*given, *engine, f"model.lora.push={push}")
            if push == "adapters":
                chosen = (*chosen, "model.lora.evaluated={base: ''}")
            run_ranks(2, run_body, config, "megatron", *chosen, timeout=300, preloaded=VLLM)
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


@pytest.mark.ranks
def test_servers_that_take_adapters_give_the_run_of_an_engine_that_takes_merged_weights(
    arithmetic: Path, tmp_path: Path
) -> None:
    config, told = arithmetic / "run.yaml", {}
    engine = ("rollout.engine=vllm", "rollout.cpu_cache_gib=0.05", "rollout.max_batch=8")
    served = ("strategy=separate", "model.lora.push=adapters")
    for name, chosen in (("merged", ()), ("served", served)):
        output = tmp_path / name
        given = (f"trainer.output={output}", "trainer.steps=3", *OPTIONS, *engine, *chosen)
        run_ranks(2, run_body, config, "megatron", *given, timeout=300, preloaded=VLLM)
        told[name] = steps_of(output)
    for line, expected in zip(told["served"], told["merged"], strict=True):
        assert line["push_bytes"] == line["push_adapter_bytes"] > 0, "the model was sent again"
        assert line["logprob_gap_max"] < 1e-4
        for name in ("reward", "response_length", "loss", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


@pytest.mark.ranks
def test_ppo_whose_policy_and_critic_have_adapters_goes_on_as_if_it_had_not_ended(
    arithmetic: Path, tmp_path: Path
) -> None:
    """And its exports are the products of its pairs."""
    config, whole, ended = arithmetic / "run.yaml", tmp_path / "whole", tmp_path / "ended"
    compared = (*COMPARED, "critic_loss", "critic_grad_norm", "critic_value")
    for output in (whole, ended):
        given = (f"trainer.output={output}", "trainer.steps=2", *PPO)
        run_ranks(2, run_body, config, "megatron", *given, timeout=200)
        if output == whole:  # the other one ended before its second checkpoint
            shutil.copytree(whole, ended)
            shutil.rmtree(ended / "checkpoints" / "step_000002")
    wanted, seen = steps_of(whole), steps_of(ended)
    assert [line["step"] for line in seen] == [line["step"] for line in wanted] == [1, 2]
    assert seen[1]["time"] > wanted[1]["time"], "the second step was not taken again"
    for line, expected in zip(seen, wanted, strict=True):
        assert {key: line[key] for key in compared} == {key: expected[key] for key in compared}
        assert_memory_as_predicted(line)
    assert all(line["critic_grad_norm"] > 0 for line in wanted)
    assert wanted[-1]["critic_value"] != 0, "the head, which begins at 0, learns nothing"
    assert_learnt_beside_the_reference(wanted)
    assert_exports_the_products(arithmetic / "model", whole)
    reader = TrainingReader(whole / "checkpoints" / "step_000002")
    keys = {key for key in reader.stored if key.startswith("critic/weights/")}
    assert keys
    assert {key for key in keys if ".lora_" not in key} == {"critic/weights/score.weight"}


@pytest.mark.ranks
def test_a_critic_of_adapters_in_a_layout_of_its_own_goes_on_from_one_on_the_policys_weights(
    arithmetic: Path, tmp_path: Path
) -> None:
    config, shared, own = arithmetic / "run.yaml", tmp_path / "shared", tmp_path / "own"
    layout = ("critic.parallel.tensor=1", "critic.parallel.pipeline=2")
    # shared weights have the checksum of a copy, under another layout
    for output, steps, critic in ((shared, 2, ()), (own, 1, layout), (shared, 3, layout)):
        given = (f"trainer.output={output}", f"trainer.steps={steps}", *PPO, *critic)
        run_ranks(2, run_body, config, "megatron", *given, timeout=200)
    wanted, found = steps_of(shared), steps_of(own)
    assert [line["step"] for line in wanted] == [1, 2, 3]
    for line in (*wanted, *found):
        assert_memory_as_predicted(line)
    # dropout draws other numbers in another layout
    assert found[0]["critic_loss"] == pytest.approx(wanted[0]["critic_loss"], rel=1e-4)


@pytest.mark.ranks
def test_a_reward_model_of_adapters_learns_from_the_command_line_and_goes_on(
    arithmetic: Path, tmp_path: Path
) -> None:
    options = (
        f"data.train={arithmetic / 'pairs.jsonl'}",
        f"data.eval={arithmetic / 'held_out_pairs.jsonl'}",
        *("algorithm.task=reward_model", "model.lora.rank=8", "checkpoint.every=1"),
    )
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    for output, steps in ((whole, 4), (ended, 3), (ended, 4)):
        given = (f"trainer.output={output}", f"trainer.steps={steps}", *options)
        ended_with = train_rl(arithmetic / "given.yaml", *given, "--processes", "2")
        assert ended_with.returncode == 0, ended_with.stderr
    wanted, seen = steps_of(whole), steps_of(ended)
    assert [line["loss"] for line in seen] == [line["loss"] for line in wanted]
    assert [line["grad_norm"] for line in seen] == [line["grad_norm"] for line in wanted]
    for folder in (whole, ended):
        assert (folder / "reward_model_adapter" / "adapter_config.json").is_file()
    merged = load_file(next((whole / "reward_model").glob("*.safetensors")))
    by_hand = plain_adapters.merged_by_hand(arithmetic / "model", whole / "reward_model_adapter")
    for name in merged.keys() & by_hand.keys():
        torch.testing.assert_close(merged[name], by_hand[name].float(), atol=1e-6, rtol=1e-5)
    assert merged["score.weight"].abs().max() > 0


@pytest.mark.ranks
def test_a_policy_of_adapters_is_judged_by_a_reward_model_that_has_none(
    arithmetic: Path, tmp_path: Path
) -> None:
    """And its critic begins with adapters of its own, not with the policy's."""
    pairs = plain_adapters.random_pairs(arithmetic / "model", rank=8)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=32)
    judge = AutoModelForSequenceClassification.from_pretrained(
        arithmetic / "model", num_labels=1, dtype=torch.float32
    )
    judge.save_pretrained(tmp_path / "judge")
    encode = AutoTokenizer.from_pretrained(arithmetic / "model")
    output = tmp_path / "out"
    given = (
        *(f"trainer.output={output}", "trainer.steps=1", "checkpoint.every=1"),
        *("model.lora.rank=8", f"model.lora.path={adapter}", "algorithm.advantage=gae"),
        *("reward.exact_match=0", "reward.format=0", "reward.format_pattern="),
        *("reward.model=0.5", f"reward.model_path={tmp_path / 'judge'}"),
    )
    run_ranks(1, run_body, arithmetic / "run.yaml", "megatron", *given, timeout=200)
    (line,) = steps_of(output)
    assert_memory_as_predicted(line)
    told = gzip.decompress((output / "trajectories" / "step_000001.jsonl.gz").read_bytes())
    for sample in map(json.loads, told.decode().splitlines()):
        ids = [*encode.encode(sample["prompt"]), *sample["tokens"]["id"]]
        score = judge(torch.tensor([ids])).logits[0, 0].item()
        assert sample["reward_parts"]["model"] == pytest.approx(score, abs=1e-5)
    reader = TrainingReader(output / "checkpoints" / "step_000001")
    most = {
        name: max(
            reader.whole(key).abs().max().item()
            for key in reader.stored
            if key.startswith(f"{name}/weights/") and ".lora_B." in key
        )
        for name in ("policy", "critic")
    }
    assert most["policy"] > 0.05, "the policy does not begin with the folder's adapters"
    assert 0 < most["critic"] < 0.005


@pytest.mark.ranks
def test_ppo_pushes_adapters_and_the_frozen_weights_that_its_critic_has_as_well(
    arithmetic: Path, tmp_path: Path
) -> None:
    options = (*OPTIONS, "algorithm.advantage=gae", "model.lora.push=adapters")
    engine = ("rollout.engine=vllm", "rollout.cpu_cache_gib=0.05")
    for steps in (2, 3):
        given = (f"trainer.output={tmp_path}", f"trainer.steps={steps}", *options, *engine)
        asked = (run_body, arithmetic / "run.yaml", "megatron", *given)
        run_ranks(2, *asked, timeout=300, preloaded=VLLM)
    told = steps_of(tmp_path)
    assert [line["step"] for line in told] == [1, 2, 3]
    for line in told:
        assert line["logprob_gap_max"] < 1e-4
        assert line["critic_grad_norm"] > 0
        assert 0 < line["push_adapter_bytes"] < line["push_bytes"]
        assert_memory_as_predicted(line)
