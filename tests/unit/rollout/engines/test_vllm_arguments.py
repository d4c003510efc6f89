"""What vLLM is asked for on CUDA, against the signatures of the version that is installed; and what
it must not change.
"""

import importlib
import inspect
import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.config import RolloutConfig
from rftmega.config.options.speculative import DraftModel, LookupDrafts
from rftmega.core.errors import EngineError
from rftmega.rollout.engines.vllm_models import (
    engine_row_tokens,
    has_recurrent_layers,
    model_arguments,
    prefill_arguments,
    reads_text,
    speculation_arguments,
)
from rftmega.runtime.parallel.process_group import World
from tests.family_configs import tiny_config
from tests.imitation_cuda import imitated


class FakeLLM:
    """Takes what it is given; leaves one thread, as vLLM's worker does."""

    given: dict[str, Any]

    def __init__(self, **given: Any):
        FakeLLM.given = given
        torch.set_num_threads(1)

    def apply_model(self, function: Any) -> list[Any]:
        return [function(torch.nn.Module())]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    vllm = pytest.importorskip("rftmega.rollout.engines.vllm")
    monkeypatch.setattr(vllm, "LLM", FakeLLM)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with imitated(monkeypatch):
        config = RolloutConfig(
            memory_fraction=0.45, max_prompt_tokens=100, max_response_tokens=28, max_batch=7
        )
        yield vllm.VLLMEngine(
            tmp_path, config, World(3, 8, 3, 8, torch.device("cpu")), dtype="auto", stop_ids=[1]
        )


def test_its_arguments_on_cuda_are_known_to_the_engine_and_mean_what_was_configured(
    engine: Any,
) -> None:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)} | set(
        inspect.signature(LLM.__init__).parameters
    )
    assert FakeLLM.given.keys() <= known
    given = FakeLLM.given
    assert (given["gpu_memory_utilization"], given["enable_sleep_mode"]) == (0.45, True)
    assert "kv_cache_memory_bytes" not in given
    assert given["hf_overrides"] == {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, (
        "not as its makers wrote it"
    )
    assert "compilation_config" not in given, "its own kernels serve"
    assert (given["dtype"], given["enforce_eager"], given["load_format"]) == (
        "bfloat16",
        False,
        "dummy",
    )
    assert (given["max_model_len"], given["max_num_seqs"]) == (128, 7)
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (
        1,
        "external_launcher",
    )
    assert given["seed"] == 3, "engines draw differently"


def test_latent_attention_on_a_cpu_has_kernels_that_take_float32(tmp_path: Path) -> None:
    """With AMX vLLM would choose others."""
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    given = model_arguments(tmp_path, on_cuda=False)
    assert given["attention_config"] == {"backend": "CPU_MLA"}
    assert "attention_config" not in model_arguments(tmp_path, on_cuda=True)


def test_lfm2_moe_has_rotary_embeddings_of_torch_on_a_cpu(tmp_path: Path) -> None:
    """Measured by `python -m tests.families --vllm lfm2_moe`."""
    (tmp_path / "config.json").write_text('{"model_type": "lfm2_moe"}')
    model_arguments(tmp_path, on_cuda=False, written_as={"quant_method": "fp8"})
    given = model_arguments(tmp_path, on_cuda=False)
    assert given == {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    assert "compilation_config" not in model_arguments(tmp_path, on_cuda=True)


@pytest.mark.parametrize(("kind", "read"), [("inkling_text", True), ("qwen3", False)])
def test_a_model_that_vllm_builds_with_its_tokenizer_has_it(
    kind: str,
    read: bool,
    tmp_path: Path,  # noqa: FBT001
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert reads_text(tmp_path) == read


def test_the_host_keeps_its_threads(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        request.getfixturevalue("engine")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_every_request_has_parameters_that_the_engine_knows(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    assert "logprobs" in inspect.signature(SamplingParams).parameters
    asked: list[Any] = []

    class Core:
        def add_request(
            self, number: str, prompt: dict[str, Any], params: Any, lora_request: Any
        ) -> None:
            assert lora_request is None  # there are no adapters
            asked.append(params)

        def step(self) -> list[Any]:
            return []

        def abort_request(self, numbers: list[str]) -> None: ...

    engine._llm.llm_engine = Core()
    from rftmega.core.types import Prompt, Sampling
    from rftmega.rollout.requests import PromptBatch

    class Once(PromptBatch):
        def stopped(self) -> bool:
            return True

    engine._serve(
        Once([Prompt((1, 2))], [7], lambda numbers, found: None), Sampling(0.7, 0.9, 5, 0.1)
    )
    (params,) = asked
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 5, 0.1)
    assert (params.temperature, params.seed, params.max_tokens, params.logprobs) == (0.7, 7, 28, 0)
    assert (params.stop_token_ids, params.ignore_eos, params.detokenize) == ([1], True, False)


class Loading(FakeLLM):
    """Keeps what its loader is given."""

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        assert name == "reload_weights"
        self.loaded = list(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> None: ...

    @property
    def llm_engine(self) -> Any:
        return SimpleNamespace(reset_encoder_cache=lambda: None)


def test_an_engine_of_8_bits_is_told_so_and_its_loader_gets_numbers_and_scales(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vllm = pytest.importorskip("rftmega.rollout.engines.vllm")
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    monkeypatch.setattr(vllm, "LLM", Loading)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with imitated(monkeypatch):
        engine = vllm.VLLMEngine(
            tmp_path,
            RolloutConfig(quantization="fp8"),
            World(0, 1, 0, 1, torch.device("cpu")),
            dtype="auto",
            stop_ids=[1],
            unquantised=["lm_head"],
        )
    understood = Fp8Config.from_config(FakeLLM.given["hf_overrides"]["quantization_config"])
    assert understood.is_checkpoint_fp8_serialized and understood.weight_block_size == [128, 128]
    assert understood.ignored_layers == ["lm_head"]
    assert engine.destinations is None, "a push would copy past its loader"
    name = "model.layers.0.self_attn.q_proj.weight"
    engine.load_weights([(name, torch.ones(4, 4)), ("lm_head.weight", torch.ones(4, 4))], version=0)
    (numbers, scales, head) = engine._llm.loaded
    assert (numbers[0], numbers[1].dtype) == (name, torch.float8_e4m3fn)
    assert (scales[0], scales[1].tolist()) == (f"{name}_scale_inv", [[pytest.approx(1 / 448)]])
    assert (head[0], head[1].dtype) == ("lm_head.weight", torch.float32)


@pytest.mark.parametrize(
    ("model_type", "recurrent"),
    [
        *((each, True) for each in ("qwen3_5_text", "falcon_h1", "lfm2_moe", "mamba2", "jamba")),
        *((each, False) for each in ("qwen3", "gemma3_text", "llama4_text", "gpt_oss")),
    ],
)
def test_the_prefix_cache_is_off_on_a_cpu_where_layers_keep_a_state(
    model_type: str, recurrent: bool, tmp_path: Path
) -> None:
    """Which needs chunks of prompts, as vLLM says at its start."""
    tiny_config(model_type).save_pretrained(tmp_path)
    given = prefill_arguments(tmp_path, RolloutConfig(), on_cuda=False)
    assert given["enable_chunked_prefill"] is False
    assert ("enable_prefix_caching" in given) == recurrent
    assert given.get("enable_prefix_caching", False) is False
    assert prefill_arguments(tmp_path, RolloutConfig(), on_cuda=True) == {}


@pytest.mark.parametrize(
    ("model_type", "longest", "small"),
    [
        ("qwen3", 80, True),
        ("gemma3_text", 256, True),
        ("qwen3", 257, False),
        ("deepseek_v3", 80, False),
        ("deepseek_v4", 80, False),
        ("qwen3_5_text", 80, False),
    ],
)
def test_blocks_of_the_cache_are_small_on_a_cpu_where_prompts_are_short(
    model_type: str, longest: int, small: bool, tmp_path: Path
) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    config = RolloutConfig(max_prompt_tokens=longest)
    given = prefill_arguments(tmp_path, config, on_cuda=False)
    assert given.get("block_size") == (32 if small else None)


def test_drafts_are_what_vllm_is_told_with_the_options_of_the_run(tmp_path: Path) -> None:
    from vllm.config import LoadConfig, SpeculativeConfig

    tiny_config("qwen3").save_pretrained(tmp_path)
    known = {field.name for field in fields(SpeculativeConfig)}
    assert speculation_arguments(tmp_path, RolloutConfig(), on_cuda=False) == {}
    lookup = LookupDrafts(draft_tokens=3, least_acceptance=0.6, most_rows=5)
    config = RolloutConfig(speculative=lookup, max_batch=9)
    given = speculation_arguments(tmp_path, config, on_cuda=False, stop_ids=[7, 8])
    assert given["speculative_config"].pop("num_speculative_tokens_per_batch_size") == [[1, 9, 3]]
    assert given == speculation_arguments(tmp_path, config, on_cuda=True, stop_ids=[7, 8])
    assert "num_speculative_tokens_per_batch_size" in known
    assert given["speculative_config"].keys() <= known
    assert given["speculative_config"]["num_speculative_tokens"] == 3
    assert given["additional_config"] == {
        "rftmega_drafts": {"least": 0.6, "most_rows": 5, "ends": [7, 8]}
    }
    module, _, name = given["speculative_config"]["model"].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    model = DraftModel(path="small", draft_tokens=2)
    config = RolloutConfig(speculative=model)
    chosen = speculation_arguments(tmp_path, config, on_cuda=True)["speculative_config"]
    assert (chosen["method"], chosen["model"]) == ("draft_model", "small")
    assert chosen["draft_load_config"].keys() <= {field.name for field in fields(LoadConfig)}
    assert chosen.keys() <= known


@pytest.mark.parametrize(
    ("positions", "original", "longest"),
    [(4096, None, 43), (41, None, 41), (None, None, 43), (4096, 42, 42), (4096, 30, 43)],
)
def test_rows_have_room_for_a_draft_if_the_model_has_positions_for_it(
    positions: int | None, original: int | None, longest: int, tmp_path: Path
) -> None:
    said = {
        "max_position_embeddings": positions,
        "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": original},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = RolloutConfig(max_prompt_tokens=10, max_response_tokens=30)
    assert engine_row_tokens(tmp_path, config) == 40
    config.speculative = LookupDrafts(draft_tokens=3)
    assert engine_row_tokens(tmp_path, config) == 40
    config.speculative = DraftModel(path="small", draft_tokens=3)
    assert engine_row_tokens(tmp_path, config) == longest


@pytest.mark.parametrize(
    "drafts", [LookupDrafts(), DraftModel(path="small")], ids=lambda drafts: drafts.type
)
def test_a_model_with_recurrent_layers_has_no_drafts(drafts: Any, tmp_path: Path) -> None:
    tiny_config("qwen3_5_text").save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=f"type={drafts.type}: layers of .* have a recurrent"):
        speculation_arguments(tmp_path, RolloutConfig(speculative=drafts), on_cuda=True)


def test_a_model_that_transformers_does_not_know_keeps_its_prefix_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    assert not has_recurrent_layers(tmp_path)


@pytest.mark.parametrize(
    ("fields_of_rope", "rotated"),
    [({"rope_parameters": {"partial_rotary_factor": 0.5}}, 16), ({"rotary_dim": 8}, 8), ({}, 32)],
)
def test_vllm_is_told_what_transformers_leaves_out_of_minimax_m2(
    fields_of_rope: dict[str, Any], rotated: int, tmp_path: Path
) -> None:
    fields = {"model_type": "minimax_m2", "head_dim": 32} | fields_of_rope
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert model_arguments(tmp_path, on_cuda=True)["hf_overrides"] == {
        "rotary_dim": rotated,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }
