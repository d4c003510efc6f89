"""Decoders of many architectures, most of which have no table here: trained for two steps on FSDP2,
pushed to the engine and exported, they are what transformers reads back.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import OptimizerConfig, ParallelConfig, RolloutConfig, TrainerConfig
from rftmega.core.errors import CheckpointError
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.run.placement.export import export
from rftmega.run.placement.supervised import SupervisedStrategy
from rftmega.run.train import built_backend
from rftmega.trainer.experience import given
from rftmega.weights import EngineWeights
from tests.chosen import chosen
from tests.layouts import build_policy, config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_decoders import DECODER, MOE, VOCABULARY, WINDOWS

TOKENS = [[5, 9, 4, 7, 8, 3, 11, 40], [6, 50, 33], [7, 12, 80, 95, 21]]
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {**MOE, "num_experts": 4, "num_local_experts": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 4, "layer_types": WINDOWS, "tie_word_embeddings": True},
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 24},
    "glm4": {},
    "granite": {"logits_scaling": 4.0},
    "cohere2": {"sliding_window": 4, "tie_word_embeddings": True},
    "olmo3": {"sliding_window": 4},
    "smollm3": {},
    "starcoder2": {"sliding_window": 4},
    "lfm2": {"block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv"]},
    "phi": {},
    "phimoe": {**EXPERTS, "lm_head_bias": True, "router_jitter_noise": 0.0},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "olmoe": EXPERTS,
    "granitemoe": {**EXPERTS, "logits_scaling": 3.0},
    "ernie4_5": {},
    "helium": {},
    "exaone4": {},
    "gpt_neox": {},
    "stablelm": {},
    "nemotron": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "qwen3": {"tie_word_embeddings": True},
    "gpt_oss": {**EXPERTS, "sliding_window": 4},
}
FEW = ["gemma3_text", "qwen3_next", "olmo3", "lfm2", "phimoe", "codegen", "bloom", "gpt_oss"]


def save_architecture(folder: Path, kind: str) -> Path:
    """Writes a random decoder of a type of transformers', far from zero everywhere."""
    config = AutoConfig.for_model(kind, **(DECODER | ARCHITECTURES[kind]))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


def trained_body(world: Any, folders: dict[str, Path]) -> dict[str, Any]:
    return {kind: trained(folder) for kind, folder in folders.items()}


def trained(folder: Path) -> tuple[Tensor, list[Tensor]]:
    """Returns the log-probs of the trained policy, and the logits of the engine that has it."""
    fast = OptimizerConfig(learning_rate=1e-2)
    actor = build_policy(folder, ParallelConfig(), fast, backend="fsdp")
    where = torch.device("cpu")
    engine = TransformersEngine(folder, RolloutConfig(), stop_ids=[2], where=where)
    sync = EngineWeights(actor.shards(), engine, bucket_bytes=20_000)
    rows = rows_of(TOKENS)
    for _ in range(2):
        actor.step(given(rows), cross_entropy_loss())
    actor.residency.finish()
    sync.push(version=1)
    export(actor, folder / "trained", TrainerConfig())
    with torch.no_grad():
        logits = [engine.model(torch.tensor([row])).logits[0] for row in TOKENS]
    return actor.log_probs(rows).logp, logits


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_architecture(folder / kind, kind) for kind in chosen(request, "kind")}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[str, Any]:
    (found,) = run_ranks(1, trained_body, folders)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in FEW else pytest.param(kind, marks=pytest.mark.ranks)
        for kind in ARCHITECTURES
    ],
)
def test_what_was_trained_is_what_is_pushed_and_what_transformers_reads_back(
    kind: str, folders: dict[str, Path], found: dict[str, Any]
) -> None:
    logp, pushed = found[kind]
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (folders[kind], folders[kind] / "trained")
    )
    assert before.config.to_dict() | {"_name_or_path": ""} == after.config.to_dict() | {
        "_name_or_path": ""
    }
    for row, own_logits, own in zip(TOKENS, pushed, logp, strict=True):
        ids = torch.tensor(row)
        with torch.no_grad():
            wanted = after(ids[None]).logits[0]
            assert (before(ids[None]).logits[0] - wanted).abs().max() > 1e-3, "nothing was learnt"
        assert own_logits.shape == (len(row), VOCABULARY)
        torch.testing.assert_close(own_logits, wanted, rtol=0, atol=1e-5)
        chosen = wanted[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(own[: len(chosen)], chosen, rtol=0, atol=1e-5)


def begun_body(world: Any, folder: Path, output: Path) -> str:
    config = config_of(folder, ParallelConfig(), backend="fsdp")
    config.algorithm.task, config.trainer.output = "sft", str(output)
    config.algorithm.ema_beta = 0.5
    try:
        SupervisedStrategy(config, world, built_backend(config))
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_export_that_could_not_be_is_told_by_every_process_before_a_step(tmp_path: Path) -> None:
    folder, output = save_architecture(tmp_path / "model", "olmo3"), tmp_path / "run"
    assert run_ranks(2, begun_body, folder, output) == ["", ""]
    assert list(output.iterdir()) == [], "a rehearsal leaves nothing behind"
    (output / "policy_ema.incomplete").mkdir()
    (output / "policy_ema.incomplete/mine").write_text("")
    first, second = run_ranks(2, begun_body, folder, output)
    assert first == second
    assert f"At its end, the model could not be exported to {output}/policy_ema: " in first
    assert "policy_ema.incomplete is there, and no export made it" in first
    assert (output / "policy_ema.incomplete/mine").exists()
