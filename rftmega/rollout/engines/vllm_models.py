"""Arguments of vLLM's that make it compute a model as transformers does, where its own reading of
the folder differs.
"""

from pathlib import Path
from typing import Any

from rftmega.config import RolloutConfig
from rftmega.core.json_files import read_json_object

CPU_STEP_TOKENS = 4096  # that an engine computes at once

DEEPSEEK_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""How this family chooses experts.

Its makers' config.json says so, transformers' does not, and vLLM takes other ways then.
"""

VISION_MOE = {"text_config": {"norm_topk_prob": True}}
"""How Qwen3-VL's mixture weighs experts: published files say so, transformers' do not, and vLLM
looks for it.
"""


def model_arguments(
    folder: str | Path, *, on_cuda: bool, written_as: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns keyword arguments of `vllm.LLM` for the model in `folder`; `written_as`: how the weights
    that it gets are quantised.

    On a CPU, vLLM 0.32's kernel rotates neighbouring elements (DeepSeek's way) wrongly in queries
    of several heads, so its own operations in torch serve.
    """
    config = read_json_object(Path(folder) / "config.json")
    arguments = _of_family(config, on_cuda=on_cuda)
    if config.get("quantization_config") or written_as:
        # It gets the trainer's weights: what the folder says of its own does not count.
        overrides = arguments.get("hf_overrides", {}) | {"quantization_config": written_as}
        arguments["hf_overrides"] = overrides
    return arguments


def _of_family(config: dict[str, Any], *, on_cuda: bool) -> dict[str, Any]:
    if config.get("vision_config"):
        # The trainer's own normalisation. vLLM would keep it in buffers of the tower, which are
        # noise in an engine that starts without weights, and which no push mends.
        seeing: dict[str, Any] = {"mm_device_do_normalize": False}
        if config["model_type"] == "qwen3_vl_moe":
            seeing["hf_overrides"] = VISION_MOE
        return seeing
    if config["model_type"] not in ("deepseek_v3", "kimi_k2"):
        return {}
    arguments: dict[str, Any] = {"hf_overrides": DEEPSEEK_V3}
    if not on_cuda:
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        # on a CPU with AMX it would take kernels that refuse float32
        arguments["attention_config"] = {"backend": "CPU_MLA"}
    return arguments


def sees(folder: str | Path) -> bool:
    """Returns whether the model has a vision tower."""
    return bool(read_json_object(Path(folder) / "config.json").get("vision_config"))


def prefill_arguments(config: RolloutConfig, *, on_cuda: bool) -> dict[str, Any]:
    """Returns keyword arguments of `vllm.LLM` that leave prompts in one piece on a CPU.

    vLLM 0.32 draws a token behind each piece of a prompt, and then sets the request's generator
    back, which none of a CPU's can be.
    """
    if on_cuda:
        return {}
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, config.max_row_tokens),
    }


def limits_of(config: RolloutConfig) -> dict[str, int]:
    """Returns how many images and videos a prompt may have."""
    return {"image": max(1, config.max_images), "video": config.max_videos}


def stop_strings(config: RolloutConfig) -> dict[str, Any]:
    """Returns the sampling parameters by which vLLM ends answers at `rollout.stop`.

    An answer keeps all that was sampled, the token that completed the string included. Without stop
    strings nothing is decoded.
    """
    if not config.stop:
        return {"detokenize": False}
    return {"detokenize": True, "stop": list(config.stop), "include_stop_str_in_output": True}
