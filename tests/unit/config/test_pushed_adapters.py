"""What engines get of a policy with adapters, where nobody says it."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rftmega.config import LoRA, ModelConfig, RolloutConfig, RunConfig, served_rank, why_merged
from rftmega.config.pushed_adapters import SERVED


def run(folder: Path, fields: dict[str, object], lora: LoRA, **rollout: object) -> RunConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} | fields))
    chosen = RolloutConfig(**({"engine": "vllm"} | rollout))  # type: ignore[arg-type]
    return RunConfig(model=ModelConfig(path=str(folder), lora=lora), rollout=chosen)


@pytest.mark.parametrize(
    ("fields", "targets", "rollout", "why"),
    [
        ({}, [], {}, ""),
        ({}, ["q_proj", "embed_tokens"], {}, ""),
        ({"model_type": "qwen2"}, ["q_proj"], {}, ""),
        ({"model_type": "qwen2"}, ["lm_head"], {}, "embedding and head out of models of qwen2"),
        ({"model_type": "seed_oss"}, [], {}, "not tried with adapters of seed_oss"),
        ({"num_experts": 8}, ["q_proj"], {}, "no experts' weights"),
        ({"num_experts": None}, ["q_proj"], {}, ""),
        ({}, [], {"engine": "transformers"}, "rollout.engine=transformers"),
        ({}, [], {"engine": "scripted"}, "rollout.engine=scripted"),
        ({}, [], {"transport": "checkpoint"}, "rollout.transport=checkpoint"),
        ({}, [], {"quantization": "fp8"}, "rollout.quantization=fp8"),
    ],
)
def test_adapters_are_pushed_as_adapters_wherever_the_engine_takes_them(
    fields: dict[str, object],
    targets: list[str],
    rollout: dict[str, object],
    why: str,
    tmp_path: Path,
) -> None:
    config = run(tmp_path, fields, LoRA(rank=8, targets=targets), **rollout)
    assert LoRA().push == "auto"
    assert served_rank(config) == (0 if why else 8)
    assert why in why_merged(config) and bool(why) == bool(why_merged(config))


def test_in_float32_weights_are_merged_unless_the_option_says_otherwise(tmp_path: Path) -> None:
    for push, rank in (("auto", 0), ("adapters", 8), ("merged", 0)):
        config = run(tmp_path, {}, LoRA(rank=8, push=push))  # type: ignore[arg-type]
        config.model.dtype = "float32"
        assert served_rank(config) == rank
        assert why_merged(config).startswith("in float32")
    config = run(tmp_path, {}, LoRA(rank=8, evaluated={"base": ""}))
    config.model.dtype = "float32"
    assert served_rank(config) == 8, "an engine with merged weights serves no others"


def test_what_is_said_is_done_and_without_adapters_there_are_none(tmp_path: Path) -> None:
    assert served_rank(run(tmp_path, {}, LoRA(rank=8, push="merged"))) == 0
    said = LoRA(rank=8, push="adapters")
    assert served_rank(run(tmp_path, {"model_type": "olmo2"}, said)) == 8
    assert served_rank(run(tmp_path, {}, LoRA())) == 0
    gone = run(tmp_path, {}, LoRA(rank=8))
    (tmp_path / "config.json").unlink()
    assert served_rank(gone) == 0


def test_vllm_serves_adapters_of_every_family_that_gets_them() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    models = Path(spec.submodule_search_locations[0]) / "model_executor/models"
    bases: dict[str, list[str]] = {}
    for file in models.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(each) for each in node.bases]

    def serves(name: str) -> bool:
        return name == "SupportsLoRA" or any(map(serves, bases.get(name, [])))

    for family in SERVED:
        assert serves(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]), family
    assert not serves(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["olmo2"]), "everything is served"
