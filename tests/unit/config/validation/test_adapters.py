"""Adapters that can't be are refused before a model is built."""

import json
from pathlib import Path

import pytest

from rftmega.config import LoRA, load
from rftmega.config.options.algorithms import GAE
from rftmega.config.validation.adapters import adapters
from rftmega.core.errors import ConfigError
from rftmega.run.preflight import preflight
from tests import plain_adapters
from tests.tiny_models import save_tiny
from tests.unit.run.test_preflight import P, config_of

PUSHED = (
    *("model.lora.rank=8", "model.lora.push=adapters", "rollout.engine=vllm"),
    "data.eval=held_out.jsonl",
)


def reasons(folder: Path, *options: str) -> list[str]:
    (folder / "run.yaml").write_text(f"model: {{path: {folder}}}")
    return adapters(load(folder / "run.yaml", list(options)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model.lora.alpha=8"], "model.lora.alpha=8.0 needs model.lora.rank above 0"),
        (["model.lora.targets=[q_proj]"], "model.lora.targets=['q_proj'] needs model.lora.rank"),
        (["model.lora.dropout=0.1"], "model.lora.dropout=0.1 needs model.lora.rank"),
        (["model.lora.rslora=true"], "model.lora.rslora=True needs model.lora.rank above 0"),
        (["model.lora.push=adapters"], "model.lora.push=adapters needs model.lora.rank above 0"),
        (
            ["model.lora.rank=8", "model.lora.push=adapters", "rollout.engine=transformers"],
            "rollout.engine=transformers takes merged weights",
        ),
        (
            [
                *("model.lora.rank=8", "model.lora.push=adapters", "strategy=separate"),
                "rollout.transport=checkpoint",
            ],
            "rollout.transport=checkpoint is for servers without this package",
        ),
        (["model.lora.path=x"], "model.lora.path=x needs model.lora.rank"),
        (["model.lora.evaluated={base: ''}"], "needs model.lora.rank above 0"),
        ([*PUSHED, "model.lora.evaluated={base: ''}", "data.eval="], "needs data.eval or"),
        ([*PUSHED, "model.lora.evaluated={a/b: ''}"], "'a/b' becomes a part of metrics' names"),
        (
            [*PUSHED, "model.lora.evaluated={a: ''}", "data.eval=", "data.evals.a=x"],
            "a is a set of data.evals",
        ),
        ([*PUSHED, "model.lora.evaluated={a: x}"], "evaluated.a=x has no adapter_config.json"),
        (
            [*PUSHED, "model.lora.evaluated={base: ''}", "strategy=separate"],
            "and servers, answer with the policy alone",
        ),
        (
            ["model.lora.rank=8", "data.eval=x", "model.lora.evaluated={base: ''}"],
            "needs model.lora.push=adapters and strategy=colocated",
        ),
        (["model.lora.base_on_host=int8"], "model.lora.base_on_host=int8 needs model.lora.rank"),
        (
            ["model.lora.rank=8", "model.lora.base_on_host=int8", "trainer.offload=false"],
            "model.lora.base_on_host=int8 needs algorithm.task=rl and trainer.offload=true",
        ),
        (
            ["model.lora.rank=8", "algorithm.task=reward_model", "model.lora.path=x"],
            "set model.path to their merged folder",
        ),
        (
            ["model.lora.rank=8", "model.lora.targets=[linear_qkv]", "backend=fsdp"],
            "linear_qkv is no linear layer",
        ),
        (["model.lora.rank=12", "rollout.engine=vllm"], "Choose one of: 1, 8, 16, 32, 64, 128"),
        (["model.lora.rank=8", "model.lora.targets=[score]"], "score is no linear layer"),
        (
            ["model.lora.rank=8", "model.lora.targets=[word_embeddings]", "backend=fsdp"],
            "word_embeddings is no linear layer of attention or MLP. Choose from: q_proj",
        ),
        (
            ["model.lora.rank=8", "model.lora.targets=[lm_head]", "algorithm.task=reward_model"],
            "a reward model has no output head",
        ),
        (
            ["model.lora.rank=8", "model.lora.path=x"],
            "model.lora.path=x has no adapter_config.json",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_has_no_adapters_or_can_have_none_is_refused(
    options: list[str], said: str, tmp_path: Path
) -> None:
    found = reasons(tmp_path, *options)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["model.lora.rank=8", "algorithm.advantage=gae"],
        ["model.lora.rank=8", "algorithm.task=reward_model"],
        ["model.lora.rank=8", "algorithm.advantage=gae", "backend=fsdp"],
        ["model.lora.rank=8", "algorithm.task=reward_model", "backend=fsdp"],
        ["model.lora.rank=12", "rollout.engine=transformers"],
        ["model.lora.rank=8", "model.lora.targets=[q_proj]", "backend=fsdp"],
        ["model.lora.rank=8", "model.lora.targets=[embed_tokens, lm_head]", "backend=fsdp"],
        ["model.lora.rank=12", "rollout.engine=vllm", "algorithm.task=sft"],
        ["model.lora.rank=8", "model.lora.targets=[embed_tokens, lm_head, word_embeddings]"],
        ["model.lora.rank=320", "model.lora.targets=[linear_qkv,down_proj]", "rollout.engine=vllm"],
    ],
)
def test_adapters_that_can_be_are_let_through(options: list[str], tmp_path: Path) -> None:
    assert reasons(tmp_path, *options) == []


def test_a_frozen_adapter_has_at_most_the_policys_rank(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    for rank, found in ((8, []), (16, [f"evaluated.first={folder} has rank 16; engines serve up"])):
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        said = reasons(tmp_path, *PUSHED, f"model.lora.evaluated.first={folder}")
        assert len(said) == len(found)
        assert all(part in each for part, each in zip(found, said, strict=True))


def test_a_model_with_a_tower_can_have_no_adapters_yet(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"depth": 1}}))
    assert "has a tower" in reasons(tmp_path, "model.lora.rank=8")[0]


@pytest.mark.parametrize(
    ("variant", "lora", "said"),
    [
        ("phi3", LoRA(rank=8, targets=["q_proj"]), "q_proj can't have an adapter in this model"),
        ("qwen3-moe", LoRA(rank=8, targets=["w1"]), "Choose from: down_proj, embed_tokens, gate_"),
        ("qwen3-tied", LoRA(rank=8, targets=["q_proj", "lm_head"]), "lm_head: .* is its embedding"),
        ("qwen3-tied", LoRA(rank=8, targets=["embed_tokens"]), "embed_tokens: .* untie the folder"),
        ("qwen3-tied", LoRA(rank=8, targets=["x_proj"]), "Choose from: down_proj, gate_proj"),
        (
            "qwen2",
            LoRA(rank=8, targets=["q_proj", "word_embeddings"], push="adapters"),
            "vLLM leaves adapters on embed_tokens out of models of qwen2; .*push=merged",
        ),
        ("deepseek-v3", LoRA(rank=8), "latent attention"),
    ],
)
def test_layers_that_the_model_does_not_have_are_told_before_it_is_built(
    variant: str, lora: LoRA, said: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, variant, P(), "scripted")
    config.model.lora = lora
    with pytest.raises(ConfigError, match=said):
        preflight(config, 1)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_layers_that_the_critic_does_not_have_are_told_before_it_is_built(
    backend: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    config.backend = backend
    config.algorithm.advantage = GAE()
    config.critic.path = str(save_tiny(tmp_path / "critic", "phi3"))
    config.model.lora = LoRA(rank=8, targets=["q_proj"])
    with pytest.raises(ConfigError, match=r"For the critic, critic\.path=.*q_proj can't have"):
        preflight(config, 1)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_critic_has_an_adapter_on_its_embedding_and_none_on_the_head_that_it_has_not(
    backend: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    config.backend = backend
    config.algorithm.advantage = GAE()
    config.critic.path = str(save_tiny(tmp_path / "critic", "phi3"))
    for beside in ("embed_tokens", "lm_head"):
        config.model.lora = LoRA(rank=8, targets=["o_proj", beside])
        preflight(config, 1)
    config.model.lora = LoRA(rank=8, targets=["lm_head"])
    with pytest.raises(ConfigError, match=r"For the critic.*lm_head is all that is named"):
        preflight(config, 1)


@pytest.mark.parametrize(
    ("variant", "lora", "said"),
    [
        (
            "phi3",
            LoRA(rank=8, targets=["q_proj"]),
            "Choose from: down_proj, embed_tokens, gate_up_proj, lm_head, o_proj",
        ),
        ("qwen3-tied", LoRA(rank=8, targets=["q_proj", "lm_head"]), "lm_head: .* is its embedding"),
        ("qwen3-tied", LoRA(rank=8, targets=["embed_tokens"]), "embed_tokens: .* untie the folder"),
        (
            "qwen2",
            LoRA(rank=8, targets=["q_proj", "embed_tokens"], push="adapters"),
            "vLLM leaves adapters on embed_tokens out of models of qwen2; .*push=merged",
        ),
        (
            "mixtral",
            LoRA(rank=8, targets=["up_proj"]),
            "up_proj can't have an adapter in this model. Choose from: embed_tokens, k_proj, lm_head, o_proj, q_proj",
        ),
        (
            "qwen3-moe",
            LoRA(rank=8, targets=["q_proj"], push="adapters"),
            "push=adapters: the model has experts",
        ),
    ],
)
def test_layers_that_can_have_no_adapters_under_fsdp_are_told_before_the_model_is_built(
    variant: str, lora: LoRA, said: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, variant, P(), "vllm")
    config.backend, config.model.lora = "fsdp", lora
    with pytest.raises(ConfigError, match=said):
        preflight(config, 1)


@pytest.mark.parametrize("targets", [[], ["q_proj", "o_proj"], ["up_proj"]])
def test_any_layer_of_a_moe_can_have_adapters_under_fsdp(
    targets: list[str], tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3-moe", P(), "vllm")
    config.backend = "fsdp"
    config.model.lora = LoRA(rank=8, targets=targets)
    preflight(config, 1)


def test_adapters_of_moe_models_are_pushed_merged_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3-moe", P(), "vllm")
    for targets in ([], ["q_proj"]):
        config.model.lora = LoRA(rank=8, push="adapters", targets=targets)
        with pytest.raises(ConfigError, match="model.lora.push=adapters: the model has experts"):
            preflight(config, 1)
    config.model.lora = LoRA(rank=8)
    preflight(config, 1)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_an_adapters_folder_of_another_rank_is_told_before_the_model_is_built(
    backend: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    config.backend = backend
    pairs = plain_adapters.random_pairs(Path(config.model.path), rank=8)
    folder = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=32)
    config.model.lora = LoRA(rank=8, alpha=32, path=str(folder))
    preflight(config, 1)
    config.model.lora = LoRA(rank=16, alpha=32, path=str(folder))
    with pytest.raises(ConfigError, match="r=8 is not 16, which model.lora.rank says"):
        preflight(config, 1)
