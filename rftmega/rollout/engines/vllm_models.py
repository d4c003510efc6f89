"""Engine arguments that make vLLM compute a model as transformers does, for models whose folder
vLLM would read differently.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RolloutConfig
from rftmega.config.options.speculative import DraftModel, LookupDrafts
from rftmega.core.errors import EngineError
from rftmega.core.json_files import read_json_object

CPU_STEP_TOKENS = 4096  # per engine step
SHORT_PROMPT = 256  # tokens
CPU_BLOCK = 32  # tokens of a block of the KV cache where prompts are short
READ_TEXT = ("inkling_text",)  # vLLM builds them with their tokenizer
OWN_BLOCKS = ("deepseek_v4",)
LOOKUP = "rftmega.rollout.engines.draft_lookup.LookupProposer"
# transformers' names of layers with a recurrent or convolutional state
RECURRENT = {"linear_attention", "conv", "hybrid", "recurrent", "mamba"}

DEEPSEEK_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Expert selection of DeepSeek-V3.

The published config.json has these keys; configs that transformers writes lack them, and vLLM then
selects experts differently.
"""

MINIMAX_M2 = {"scoring_func": "sigmoid", "use_routing_bias": True}
"""Expert selection of MiniMax-M2, which vLLM reads in published configs; configs that transformers
writes lack these keys, and `rotary_dim`.
"""

NATIVE_ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Rotary embeddings by torch. On a CPU, vLLM 0.32's kernel rotates interleaved elements (as in
DeepSeek) wrongly in multi-head queries, and those of LFM2-MoE, too.
"""

VISION_MOE = {"text_config": {"norm_topk_prob": True}}
"""Expert weighting of Qwen3-VL-MoE: published configs have this key, which vLLM reads; configs that
transformers writes lack it.
"""


def model_arguments(
    folder: str | Path, *, on_cuda: bool, written_as: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the keyword arguments of `vllm.LLM` that the model in `folder` needs to be computed
    as in the trainer. `written_as`: the quantization_config of the weights as they are pushed into
    vLLM; None if these are not quantised.
    """
    config = read_json_object(Path(folder) / "config.json")
    arguments = _of_family(config, on_cuda=on_cuda)
    if config.get("quantization_config") or written_as:
        # The trainer's weights are loaded: the folder's own quantization does not apply.
        overrides = arguments.get("hf_overrides", {}) | {"quantization_config": written_as}
        arguments["hf_overrides"] = overrides
    return arguments


def _of_family(config: dict[str, Any], *, on_cuda: bool) -> dict[str, Any]:
    if config.get("vision_config"):
        # Use the trainer's normalisation. vLLM would keep it in buffers of the vision tower, which
        # are random in an engine that starts without weights and are never pushed.
        seeing: dict[str, Any] = {"mm_device_do_normalize": False}
        if config["model_type"] == "qwen3_vl_moe":
            seeing["hf_overrides"] = VISION_MOE
        return seeing
    if config["model_type"] == "minimax_m2":
        return {"hf_overrides": MINIMAX_M2 | {"rotary_dim": _rotated(config)}}
    if config["model_type"] == "lfm2_moe":
        return {} if on_cuda else dict(NATIVE_ROTARY)
    if config["model_type"] not in ("deepseek_v3", "kimi_k2"):
        return {}
    arguments: dict[str, Any] = {"hf_overrides": DEEPSEEK_V3}
    if not on_cuda:
        arguments |= NATIVE_ROTARY
        # on a CPU with AMX it would choose kernels that refuse fp32
        arguments["attention_config"] = {"backend": "CPU_MLA"}
    return arguments


def reads_text(folder: str | Path) -> bool:
    """Returns whether vLLM's code of the model in `folder` reads the tokenizer."""
    return read_json_object(Path(folder) / "config.json").get("model_type") in READ_TEXT


def _rotated(config: dict[str, Any]) -> int:
    """Returns how many elements of a head rotary embeddings rotate in the model of a config.json of
    MiniMax-M2.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction is None:
        return int(config.get("rotary_dim", config["head_dim"]))
    return int(config["head_dim"] * fraction)


def sees(folder: str | Path) -> bool:
    """Returns whether the model in `folder` has a vision encoder, by its config.json."""
    return bool(read_json_object(Path(folder) / "config.json").get("vision_config"))


def prefill_arguments(
    folder: str | Path, config: RolloutConfig, *, on_cuda: bool
) -> dict[str, Any]:
    """Returns the keyword arguments of `vllm.LLM` for the prefill of the model in `folder` on a CPU;
    {} on CUDA.

    Chunked prefill is turned off. The prefix cache keeps whole blocks of tokens, on a CPU of 128 by
    default, so that completions of a short prompt would share nothing: where prompts are short,
    blocks are smaller. Attention to long prompts is slower with such blocks.

    After each chunk of a prompt, vLLM 0.32 samples a token and then resets the request's random
    generator, which CPU generators do not support. Without chunks, vLLM can't keep recurrent states
    of prefixes, so the prefix cache is turned off for layers that have such states.
    """
    if on_cuda:
        return {}
    whole: dict[str, Any] = {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, engine_row_tokens(folder, config)),
    }
    if has_recurrent_layers(folder):
        return whole | {"enable_prefix_caching": False}
    if config.max_prompt_tokens <= SHORT_PROMPT and not _sets_block_size(folder):
        return whole | {"block_size": CPU_BLOCK}
    return whole


def _sets_block_size(folder: str | Path) -> bool:
    """Returns whether vLLM sets the size of blocks itself, as it does for latent attention."""
    said = read_json_object(Path(folder) / "config.json")
    text = said.get("text_config") or said
    return "kv_lora_rank" in text or text.get("model_type") in OWN_BLOCKS


def has_recurrent_layers(folder: str | Path) -> bool:
    """Returns whether layers of the model in `folder` keep a state instead of keys and values, by
    transformers' layer types; False for a model that transformers does not know.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except (ValueError, OSError):
        return False
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return not RECURRENT.isdisjoint(kinds or ())


def engine_row_tokens(folder: str | Path, config: RolloutConfig) -> int:
    """Returns vLLM's `max_model_len`: the most tokens of a prompt and its response. With a draft
    model, those of a draft are added, as far as the model in `folder` has positions for them: if a
    draft after the longest row of a step would not fit, vLLM 0.32 verifies token 0 as the draft of
    all rows.
    """
    if not isinstance(config.speculative, DraftModel):
        return config.max_row_tokens
    said = read_json_object(Path(folder) / "config.json")
    said = said.get("text_config") or said
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    longest = config.max_row_tokens
    room = [longest + config.speculative.draft_tokens]
    # with more than the original positions, vLLM rotates all tokens by the long factors of longrope
    room += [
        positions
        for positions in (
            said.get("max_position_embeddings"),
            said.get("original_max_position_embeddings"),
            rope.get("original_max_position_embeddings"),
        )
        if isinstance(positions, int) and positions >= longest
    ]
    return min(room)


def forbids_drafts(folder: str | Path, chosen: str) -> str:
    """Returns why the model in `folder` can't decode speculatively: rejected tokens have changed
    the state of recurrent layers; "" if it can. `chosen`: rollout.speculative.type.
    """
    if not has_recurrent_layers(folder):
        return ""
    return (
        f"rollout.speculative.type={chosen}: layers of {folder} have a recurrent state, from which rejected tokens can't be "
        "removed. Set it to none."
    )


def speculation_arguments(
    folder: str | Path, config: RolloutConfig, *, on_cuda: bool, stop_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns the keyword arguments of `vllm.LLM` for rollout.speculative; {} without it.
    `stop_ids`: tokens that end a completion, as far as they are known; nothing is drafted after
    them. Raises EngineError if the model in `folder` does not allow it.
    """
    drafts = config.speculative
    if not isinstance(drafts, LookupDrafts | DraftModel):
        return {}
    if reason := forbids_drafts(folder, drafts.type):
        raise EngineError(reason)
    if isinstance(drafts, DraftModel):
        chosen: dict[str, Any] = {
            "method": "draft_model",
            "model": drafts.path,
            # the policy's weights are random until the first push
            "draft_load_config": {"load_format": "auto"},
        }
        options: dict[str, Any] = {}
    else:
        chosen = {"method": "custom_class", "model": LOOKUP}
        options = {
            "least": drafts.least_acceptance,
            "most_rows": drafts.most_rows,
            "ends": list(stop_ids),
        }
    chosen["num_speculative_tokens"] = drafts.draft_tokens
    if not on_cuda:
        # with a table of batch sizes, vLLM does not verify placeholders to fill up a CUDA graph
        chosen["num_speculative_tokens_per_batch_size"] = [
            [1, config.max_batch, drafts.draft_tokens]
        ]
    found: dict[str, Any] = {"speculative_config": chosen}
    return found | ({"additional_config": {"rftmega_drafts": options}} if options else {})


def limits_of(config: RolloutConfig) -> dict[str, int]:
    """Returns the most images and videos that a prompt may have, as vLLM's argument
    `limit_mm_per_prompt`.
    """
    return {"image": max(1, config.max_images), "video": config.max_videos}


def stop_strings(config: RolloutConfig) -> dict[str, Any]:
    """Returns the arguments of SamplingParams that end completions at the strings in
    `rollout.stop`.

    A completion keeps all sampled tokens, including the token that completed the string. Without
    stop strings, no text is detokenized.
    """
    if not config.stop:
        return {"detokenize": False}
    return {"detokenize": True, "stop": list(config.stop), "include_stop_str_in_output": True}
