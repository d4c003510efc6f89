"""GLM-4.5, 4.6 and 4.7: RoPE on the first half of each head, and experts selected as in
DeepSeek-V3.
Its multi-token prediction layers (`num_nextn_predict_layers`) are ignored, as in transformers.
"""

from dataclasses import replace

from rftmega.model_providers.description import ModelDescription, decoder
from rftmega.model_providers.families.deepseek_v3 import sigmoid_experts
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.get("num_nextn_predict_layers")
    model = decoder(
        config,
        qkv_bias=config["attention_bias"],
        qk_norm=config["use_qk_norm"],
        partial_rope=True,
    )
    return replace(model, experts=sigmoid_experts(config, model.layers))
