"""Every field of config.json, absent, null and present: we understand what transformers builds of
it, or refuse.

transformers' model is built and run; what it is made of is read from its modules, not from its
config.
"""

import copy
import dataclasses
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from rftmega.converters.config_fields import REQUIRED
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import FAMILIES, ModelDescription, describe
from rftmega.model_providers.hf_config import NEUTRAL
from rftmega.model_providers.rope import Rope
from tests.tiny_vision import KINDS

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "initializer_range": 0.03, "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_experts": 4, "decoder_sparse_step": 2,
                           "mlp_only_layers": [2], "norm_topk_prob": True, "head_dim": 8}  # fmt: skip
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16, "attention_bias": False, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
SMALL_OF: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False, "head_dim": 16},
    "mistral": {"sliding_window": 4, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0, "sliding_window": 4,
                "head_dim": 16},
    "qwen2": WINDOWS | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "qwen2_moe": EXPERTS | WINDOWS | {"shared_expert_intermediate_size": 8, "qkv_bias": True},
    "qwen3": WINDOWS | {"head_dim": 16, "attention_bias": False},
    "qwen3_moe": EXPERTS | {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    "glm4_moe": {
        "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "n_routed_experts": 16,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 8, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    },
    "olmo2": {"head_dim": 16, "attention_bias": False},
    "phi3": {"head_dim": 16, "sliding_window": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "partial_rotary_factor": 0.5,
             "original_max_position_embeddings": 32},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 16,
                 "attention_dropout": 0.1, "residual_dropout": 0.1},
    "arcee": {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "head_dim": 16},
    "smollm3": {"attention_bias": False, "mlp_bias": False, "no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2,
                "use_sliding_window": True, "sliding_window": 4, "tie_word_embeddings": True},
    "granite": {"attention_bias": False, "mlp_bias": False, "embedding_multiplier": 3.0, "logits_scaling": 1.5,
                "residual_multiplier": 0.5, "attention_multiplier": 0.25},
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 2, "head_dim": 16},
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "head_dim": 16, "sliding_window": 4,
                    "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "glm4": {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8,
                   "router_jitter_noise": 0.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "head_dim": 16, "sliding_window": 4,
                "swiglu_alpha": 1.5, "swiglu_limit": 5.0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_experts": 4,
                                     "shared_expert_intermediate_size": 12},
    "qwen3_next": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 12},
    "hunyuan_v1_dense": {"attention_bias": False, "head_dim": 16, "eod_token_id": 3},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 8, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        "rope_interleave": True, "attention_bias": False, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
# read, declared or not
EVERYWHERE = (
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "quantization_config",
)
UNDECLARED = {"mistral": ["layer_types"], "phi3": ["layer_types"],
              "mixtral": ["layer_types", "num_experts"], "qwen2_moe": ["num_local_experts"],
              "qwen3_moe": ["num_local_experts"]}  # fmt: skip
SIZES_OF_ONE_MODEL = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "num_experts",
                      "num_local_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                      "n_routed_experts", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                      "linear_value_head_dim")  # fmt: skip
NOT_OURS = {
    "num_mtp_layers",
    "rope_parameters",
    "use_cache",
    "output_router_logits",
    "router_aux_loss_coef",
}
OTHER: dict[str, list[Any]] = {  # values to try beside those above
    "hidden_act": ["gelu"], "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention"] * 2],
    "mlp_only_layers": [[], [0]], "first_k_dense_replace": [0, 2], "num_key_value_heads": [1, 3, 4], "head_dim": [8, 7],
    "num_experts_per_tok": [1, 99], "n_group": [1, 3], "topk_group": [1, 9], "sliding_window": [2],
    "max_window_layers": [0, 2, 9], "no_rope_layers": [[0, 1, 0], [1, 1]], "sliding_window_pattern": [3, "LLG"],
    "embedding_multiplier": [2.0], "logits_scaling": [2.0], "residual_multiplier": [2.0], "attention_multiplier": [2.0],
    "rope_theta": [500.0], "attention_dropout": [0.1], "num_attention_heads": [8, 5], "partial_rotary_factor": [1.0, 0.5],
    "quantization_config": [], "rope_scaling": [{}, {"type": "linear", "factor": 2.0}], "num_nextn_predict_layers": [0, 2],
}  # fmt: skip
STRICTER = {  # refused, though transformers builds a model of it
    "hidden_act": ["gelu"],
    "attention_bias": [True],
    "attention_out_bias": [True],
    "mlp_bias": [True],
    "norm_topk_prob": [False, None],  # DeepSeek's
    "rope_interleave": [False, None],
    "use_sliding_window": [True],  # Qwen3's with experts
    "partial_rotary_factor": [0.5],
    "num_experts_per_tok": [1],  # DeepSeek's, as topk_group
    "topk_group": [1, "absent"],
    "num_key_value_heads": [3],
    "head_dim": [7],
    "num_attention_heads": [5],  # DeepSeek's, with 4 of keys
    "rope_scaling": [{"type": "linear", "factor": 2.0}],
}
ABSENT = object()


def test_every_family_is_compared() -> None:
    aside = {*KINDS, "qwen2_audio"}  # of test_vision_fields.py and test_audio_fields.py
    aside.add("kimi_k2")  # which transformers does not know: test_published.py
    assert set(FAMILIES) - set(SMALL_OF) == aside


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the warnings of transformers."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def cases() -> Iterator[Any]:
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for family in SMALL_OF:
        own = (
            {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
            - common
            - NEUTRAL
            - NOT_OURS
        )
        for name in sorted(
            own
            | set(EVERYWHERE)
            | set(UNDECLARED.get(family, []))
            | SMALL.keys()
            | SMALL_OF[family].keys()
        ):
            if (family, name) == ("qwen3_5_moe_text", "intermediate_size"):
                continue  # no layer has a dense MLP
            # what every family has is read alike but where a family has defaults of its own
            again = name in SMALL and family not in ("llama", "mistral", "qwen2_moe", "deepseek_v3")
            marks = [pytest.mark.ranks] if again else []
            yield pytest.param(family, name, id=f"{family}-{name}", marks=marks)


def values_of(name: str, usual: Any) -> list[Any]:
    """Absent, null, and some that are there."""
    others = OTHER.get(name)
    if others is None:
        others = (
            [not usual]
            if isinstance(usual, bool)
            else [2 * usual]
            if isinstance(usual, int)
            else [usual]
        )
    return [ABSENT, None, *others]


def theirs(fields: dict[str, Any]) -> Any:
    """transformers' model, once it has given logits. Raises what transformers raises."""
    bookkeeping = {"pad_token_id": None}  # a published model's is beyond this vocabulary
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(bookkeeping | copy.deepcopy(fields))
    config._attn_implementation = "eager"
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        logits = model(torch.arange(7)[None], use_cache=False).logits
    assert logits.isfinite().all()
    return model


def compare(ours: ModelDescription, model: Any) -> None:
    layers, config = model.model.layers, model.config
    compare_delta_net(ours, layers)
    if ours.attention_layers == 0:
        return
    first = attention = next(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))
    assert (ours.layers, ours.hidden) == (len(layers), model.model.embed_tokens.embedding_dim)
    assert ours.vocabulary == model.lm_head.out_features
    assert ours.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    norms = (model.model.norm, layers[0].post_attention_layernorm)
    for norm in norms:
        assert ours.norm_epsilon == (norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
        assert ours.zero_centered == (not norm.weight.any())
    assert ours.pre_norm == hasattr(layers[0], "input_layernorm")
    behind = ("post_feedforward_layernorm", "post_mlp_layernorm")
    assert ours.post_norm == any(hasattr(layers[0], name) for name in behind)
    assert ours.init_std == config.initializer_range
    assert ours.max_positions == config.max_position_embeddings
    assert ours.parameters == sum(parameter.numel() for parameter in model.parameters())
    if ours.latent:
        assert (ours.latent.query_rank, ours.latent.key_value_rank) == (
            first.q_lora_rank,
            first.kv_lora_rank,
        )
        assert ours.heads * ours.latent.value_dim == first.o_proj.in_features
        assert ours.heads * ours.head_dim == (first.q_proj or first.q_b_proj).out_features
        assert ours.latent.rope_dim == 2 * len(model.model.rotary_emb.inv_freq)
    else:
        assert ours.head_dim == attention.head_dim
        turned = 2 * len(angles_of(model.model.rotary_emb))
        assert int(ours.head_dim * ours.rope.fraction) == turned
        rows = {
            name: getattr(attention, f"{name}_proj").out_features
            for name in ("q", "k", "v", "qkv")
            if hasattr(attention, f"{name}_proj")
        }
        each = 2 if ours.output_gate else 1  # a query, and its gate
        queries, keys = each * ours.heads * ours.head_dim, ours.groups * ours.head_dim
        assert rows in (
            {"q": queries, "k": keys, "v": keys},
            {"qkv": queries + 2 * keys},  # Phi-3's
        )
        (bias,) = {getattr(attention, f"{name}_proj").bias is not None for name in rows}
        assert ours.qkv_bias == bias
        assert ours.biased == (attention.o_proj.bias is not None)
        assert ours.sinks == hasattr(attention, "sinks")
        assert ours.rotated_qk_norm == hasattr(attention, "query_layernorm")
        assert ours.qk_norm == (hasattr(attention, "q_norm") or ours.rotated_qk_norm)
        if ours.qk_norm and not ours.rotated_qk_norm:
            heads = (ours.heads, ours.groups) if ours.full_width_qk_norm else (1, 1)
            widths = tuple(norm.weight.numel() for norm in (attention.q_norm, attention.k_norm))
            assert widths == tuple(number * ours.head_dim for number in heads)
    compare_windows(ours, model)
    compare_unrotated(ours, model)
    compare_factors(ours, model)
    compare_experts(ours, layers, config)
    if ours.rope.local_base is None:
        frequencies, scale = frequencies_of(ours.rope, config, type(model.model.rotary_emb))
        assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
        assert scale == pytest.approx(model.model.rotary_emb.attention_scaling, rel=1e-9)
        return
    steps = torch.arange(0, ours.head_dim, 2) / ours.head_dim
    for kind, base, factor in (
        ("full", ours.rope.base, ours.rope.factor),
        ("sliding", ours.rope.local_base, 1.0),
    ):
        wanted = getattr(model.model.rotary_emb, f"{kind}_attention_inv_freq", None)
        if wanted is None:
            assert f"{kind}_attention" not in config.layer_types
            continue
        torch.testing.assert_close(1.0 / base**steps / factor, wanted)


def angles_of(rotary: Any) -> Any:
    names = ("inv_freq", "full_attention_inv_freq", "sliding_attention_inv_freq")
    return next(getattr(rotary, name) for name in names if hasattr(rotary, name))


def compare_delta_net(ours: ModelDescription, layers: Any) -> None:
    nets = {n: each.linear_attn for n, each in enumerate(layers) if hasattr(each, "linear_attn")}
    assert (ours.delta_net.layers if ours.delta_net else frozenset()) == frozenset(nets)
    for net in nets.values() if ours.delta_net else ():
        assert (ours.delta_net.key_heads, ours.delta_net.value_heads) == (
            net.num_k_heads,
            net.num_v_heads,
        )
        assert (ours.delta_net.key_dim, ours.delta_net.value_dim) == (
            net.head_k_dim,
            net.head_v_dim,
        )
        assert ours.delta_net.convolved == net.conv_kernel_size


def compare_windows(ours: ModelDescription, model: Any) -> None:
    everywhere = model.config.model_type in ("mistral", "mixtral", "phi3")
    windows = [
        model.config.sliding_window
        if everywhere or getattr(layer.self_attn, "is_sliding", False)
        else getattr(layer.self_attn, "sliding_window", None)
        if not hasattr(layer.self_attn, "is_sliding")
        else None
        for layer in model.model.layers
        if hasattr(layer, "self_attn")
    ]
    if ours.delta_net:
        assert set(windows) == {None}
        assert not ours.windowed
        return
    assert [ours.window if n in ours.windowed else None for n in range(ours.layers)] == windows


def compare_unrotated(ours: ModelDescription, model: Any) -> None:
    layers = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    unrotated = {n for n, each in enumerate(layers) if not getattr(each, "use_rope", True)}
    if model.config.model_type == "exaone4" and model.config.sliding_window:
        unrotated = {n for n, each in enumerate(layers) if not each.is_sliding}
    assert ours.unrotated == unrotated


def compare_factors(ours: ModelDescription, model: Any) -> None:
    first, outer = model.model.layers[0], model.config
    assert ours.scales.residual == getattr(first, "residual_multiplier", 1.0)
    usual = getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0)
    assert ours.scales.embedding == getattr(model.model, "embedding_multiplier", usual)
    assert 1.0 / ours.scales.logits == pytest.approx(getattr(outer, "logits_scaling", 1.0))
    if ours.scales.attention is not None:
        assert ours.scales.attention == first.self_attn.scaling
    elif not ours.latent:
        assert first.self_attn.scaling == pytest.approx(ours.head_dim**-0.5)
    if not ours.experts:
        gates = [hasattr(first.mlp, name) for name in ("gate_proj", "gate_up_proj")]
        assert ours.gated == any(gates)


def compare_experts(ours: ModelDescription, layers: Any, config: Any) -> None:
    sparse = {n: layer.mlp for n, layer in enumerate(layers) if hasattr(layer.mlp, "experts")}
    assert (ours.experts.layers if ours.experts else frozenset()) == frozenset(sparse)
    if ours.experts is None or not sparse:
        return
    mlp = next(iter(sparse.values()))
    if ours.clamped:
        assert (ours.clamped.alpha, ours.clamped.limit) == (mlp.experts.alpha, mlp.experts.limit)
    gate = mlp.router if hasattr(mlp, "router") else mlp.gate
    assert (ours.experts.number, ours.experts.active) == (gate.num_experts, gate.top_k)
    assert ours.experts.normalised == getattr(gate, "norm_topk_prob", True)
    if ours.experts.sigmoid:
        assert (ours.experts.groups, ours.experts.active_groups) == (
            getattr(gate, "num_group", 1),
            getattr(gate, "topk_group", 1),
        )
        assert ours.experts.scale == getattr(gate, "routed_scaling_factor", 1.0)


def frequencies_of(rope: Rope, config: Any, embedding_class: Any) -> tuple[torch.Tensor, float]:
    """What transformers makes of a rope that is said in full."""
    said: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.base}
    if rope.kind != "default":
        said["factor"] = rope.factor
    if rope.fraction != 1.0:
        said["partial_rotary_factor"] = rope.fraction
    if rope.kind == "llama3":
        said |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if rope.yarn:
        yarn = dataclasses.asdict(rope.yarn)
        said |= {"original_max_position_embeddings": yarn.pop("original_positions"), **yarn}
    full = copy.deepcopy(config)
    if rope.long:
        full.original_max_position_embeddings = rope.long.original_positions
        said |= {name: list(rope.long.divisors) for name in ("short_factor", "long_factor")}
        said["attention_factor"] = rope.long.attention_factor
    full.rope_parameters = said
    embedding = embedding_class(full)
    return embedding.inv_freq, embedding.attention_scaling


def check(fields: dict[str, Any], *, permitted: bool) -> None:
    """We understand what transformers builds, or refuse what it refuses; `permitted`: or we refuse
    all the same.
    """
    try:
        ours = describe(fields)
    except CheckpointError:
        if not permitted:
            with pytest.raises(Exception):  # noqa: B017, PT011  of whatever kind
                theirs(fields)
    else:
        compare(ours, theirs(fields))


@pytest.mark.parametrize(("family", "name"), list(cases()))
def test_a_field_is_what_transformers_makes_of_it(family: str, name: str) -> None:
    usual = SMALL | SMALL_OF[family] | {"model_type": family}
    for value in [*values_of(name, usual.get(name)), *([usual[name]] if name in usual else [])]:
        fields = {key: held for key, held in usual.items() if key != name}
        if value is not ABSENT:
            fields[name] = value
        elif name in usual and name in (*REQUIRED, *SIZES_OF_ONE_MODEL):
            with pytest.raises(CheckpointError, match=name):
                describe(fields)
            continue
        twice = {fields.get("num_experts"), fields.get("num_local_experts")} - {None}
        stricter = ("absent" if value is ABSENT else value) in STRICTER.get(name, [])
        stricter |= (family, name, value) == ("gpt_oss", "attention_bias", False)
        check(
            fields,
            permitted=stricter
            or len(twice) == 2
            or (name == "layer_types" and family in UNDECLARED),
        )


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 700.0},
    "linear": {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 700.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 20.0,
             "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": True, "attention_factor": None},
    "yarn of the paper": {"rope_type": "yarn", "rope_theta": 700.0, "factor": 3.0, "original_max_position_embeddings": 16,
                          "mscale": None, "mscale_all_dim": None, "truncate": False},
}  # fmt: skip
STRICTER_ROPES = {("mscale", ABSENT), ("mscale", None), ("mscale_all_dim", ABSENT), ("mscale_all_dim", None),
                  ("rope_type", ABSENT), ("original_max_position_embeddings", ABSENT),
                  ("partial_rotary_factor", None)}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(each, marks=pytest.mark.ranks) for each in ("mixtral", "qwen3")),
        "deepseek_v3",
        "glm4_moe",
    ],
)
@pytest.mark.parametrize("kind", list(ROPES))
def test_a_rope_is_what_transformers_makes_of_it(family: str, kind: str) -> None:
    usual = SMALL | SMALL_OF[family] | {"model_type": family, "max_position_embeddings": 96}
    names = [*ROPES[kind], "partial_rotary_factor"]
    older = family in ("llama", "qwen3")  # rope_scaling and rope_theta
    for name, value in itertools.product(names, (ABSENT, None, "as it is")):
        rope = dict(ROPES[kind])
        if value is not None:
            rope.pop(name, None) if value is ABSENT else None
        else:
            rope[name] = None
        fields = usual | ({"rope_scaling": rope} if older else {"rope_parameters": rope})
        if older and "rope_theta" in rope:
            fields["rope_theta"] = rope.pop("rope_theta")
        try:
            ours = describe(fields)
        except CheckpointError:
            unsupported = family == "deepseek_v3" and (
                kind in ("linear", "llama3", "yarn of the paper") or name == "truncate"
            )
            unsupported |= family == "glm4_moe" and "yarn" in kind  # of a part of the head
            if (name, value) not in STRICTER_ROPES and not unsupported and kind != "llama3":
                with pytest.raises(Exception):  # noqa: B017, PT011
                    theirs(fields)
        else:
            compare(ours, theirs(fields))


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 700.0, "short_factor": [1.0, 1.7],
             "long_factor": [2.0, 5.0]}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"original_max_position_embeddings": 16},  # of the rope: the config's own counts
        {"factor": 5.0},
        {"factor": None},
        {"attention_factor": 1.5},
        {"attention_factor": None, "factor": 3.0},
    ],
)
@pytest.mark.parametrize("original", [32, 48])
def test_longrope_is_what_transformers_makes_of_it(original: int, changes: dict[str, Any]) -> None:
    usual = SMALL | SMALL_OF["phi3"] | {"model_type": "phi3", "max_position_embeddings": 96}
    del usual["head_dim"]
    lengths = {"original_max_position_embeddings": original}
    fields = usual | lengths | {"rope_parameters": LONG_ROPE | changes}
    compare(describe(fields), theirs(fields))
