"""Describes any decoder from transformers' config, independent of its architecture."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rftmega.backends.decoder.per_layer import numbers_in
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.model_providers.backend_support import advice
from rftmega.model_providers.description import Experts, ModelDescription, describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.rope import Rope
from rftmega.model_providers.tower import VisionTower
from rftmega.model_providers.transformers_decoders import (
    SEEING,
    refusal_of_config,
    unknown_to_transformers,
    without_sizes,
)
from rftmega.models.hf.quantised_folder import is_quantised
from rftmega.models.rescaled_weights import without_rescaling

CHANGING = ("dynamic", "longrope")  # RoPE types whose angles depend on the longest row
# number of positions, as configs name it; a recurrent model names none
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
UNBOUNDED = 2**31
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
KEPT = "keep_window_size"  # of Doge's attention
ACTIVE = ("num_experts_per_tok", "moe_topk")


@dataclass(frozen=True)
class TransformersModel(ModelDescription):
    """TransformersModel is a ModelDescription whose number of parameters is counted in the built
    model instead of derived from the config.
    """

    counted: int = 0  # parameters of the whole model; tied embeddings count once
    matrices: int = 0  # elements of the layers' matrices that a token is multiplied with

    @property
    def parameters(self) -> int:
        return self.counted

    def with_weights(self, counted: int, matrices: int) -> "TransformersModel":
        return replace(self, counted=counted, matrices=matrices)


def read_config(path: str | Path) -> Any:
    """Returns transformers' config of a model folder.

    Raises CheckpointError if backend=fsdp can't train the model, because its type is unknown to
    transformers or no causal language model, or because it has an unsupported vision or audio
    encoder, weights quantised in a format that can't be read, or bidirectional attention.
    """
    from transformers import AutoConfig

    fields = _fields_in(path)
    if unknown := unknown_to_transformers(fields.get("model_type")):
        remedy = advice(fields, "Choose another model, or correct model_type in its config.json")
        raise CheckpointError(f"{path}: {unknown}. {remedy}")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # of each class's own code, given a user's file
        raise CheckpointError(
            f"{path}: transformers can't read this config.json: {error}"
        ) from error
    if why := refusal_of_config(config):
        names_remedy = why.rpartition(". ")[2].startswith(("Set ", "Correct "))
        remedy = "Otherwise take another model" if names_remedy else "Take another model"
        raise CheckpointError(f"{path}: {why} {advice(fields, remedy)}")
    if is_quantised(read_json_object(Path(path) / "config.json")):
        del config.quantization_config  # the trainer's weights are not
    return without_rescaling(config)


def _fields_in(path: str | Path) -> dict[str, Any]:
    """Returns the content of a folder's config.json; {} if it has none."""
    return read_json_object(path) if (path := Path(path) / "config.json").is_file() else {}


def beyond_its_positions(config: Any, longest: int) -> list[str]:
    """Lists the reasons, as error messages, why sequences of up to `longest` tokens can't be
    trained; empty if they can.

    Some RoPE types change their angles with the longest sequence of a micro-batch beyond the
    original context length (`modeling_rope_utils.dynamic_rope_update`), so log-probs would depend
    on how sequences are batched. In Doge each token attends only to the tokens with the highest
    scores; repeated tokens have equal scores, so engine and trainer may choose different ones.
    `config`: transformers' config of the model.
    """
    found = []
    text = config.get_text_config()
    for scaling in _scalings(text):
        kind = scaling.get("rope_type", "default")
        bound = scaling.get("original_max_position_embeddings") or _said(text, POSITIONS[0])
        if kind in CHANGING and longest > bound:
            found.append(
                f"rope_type={kind} of config.json changes with the longest row beyond {bound} tokens, and this run has rows of "
                f"up to {longest}: log-probs would depend on the other rows of a micro-batch. Lower rollout.max_prompt_tokens or "
                "rollout.max_response_tokens."
            )
    kept = getattr(text, KEPT, None)
    if kept and longest > kept:
        found.append(
            f"{KEPT}={kept} of config.json: in a longer row each token attends to the {kept} tokens with the highest scores. "
            "Repeated tokens have equal scores, and engine and trainer choose others of these. This run has rows of up to "
            f"{longest} tokens: set {KEPT} to this number or more, or lower rollout.max_prompt_tokens or "
            "rollout.max_response_tokens."
        )
    return found


def _scalings(config: Any) -> list[dict[str, Any]]:
    """Returns the RoPE settings of a config: a single one, or one for each layer type."""
    said = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in said.values() if isinstance(each, dict)]
    return nested if nested and "rope_type" not in said else [said]


def tower_of(path: str | Path, config: Any) -> VisionTower | None:
    """Returns a description of a model's vision encoder; None if the model has none."""
    if config.model_type not in SEEING:
        return None
    tower = describe(read_hf_config(path)).tower
    assert isinstance(tower, VisionTower)
    return tower


def describe_any(config: Any, tower: VisionTower | None = None) -> TransformersModel:
    """Describes a decoder from transformers' config, with the description of its vision encoder
    (`tower`); the parameters are not counted yet. Raises CheckpointError if a size is missing.
    """
    text = config.get_text_config()
    if missing := without_sizes(config):
        raise CheckpointError(missing)
    heads = _said(text, "num_attention_heads") or 1  # of a model without attention
    width = _said(text, "head_dim") or text.hidden_size // heads
    windows = getattr(text, "layer_types", None) or ()
    return TransformersModel(
        family=config.model_type,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        ffn=_said(text, "intermediate_size") or 0,
        heads=heads,
        groups=_said(text, "num_key_value_heads") or heads,
        head_dim=width,
        vocabulary=text.vocab_size,
        max_positions=next(
            (found for name in POSITIONS if (found := _said(text, name))), UNBOUNDED
        ),
        norm_epsilon=getattr(text, "rms_norm_eps", 1e-6),
        rope=Rope(base=0.0),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        qkv_bias=False,
        qk_norm=False,
        init_std=getattr(text, "initializer_range", 0.02),
        window=getattr(text, "sliding_window", None),
        windowed=frozenset(
            layer for layer, kind in enumerate(windows) if kind == "sliding_attention"
        ),
        experts=_experts(text),
        tower=tower,
    )


def _said(text: Any, name: str) -> Any:
    """Returns the field `name` of a config, None if there is no such field. If the field differs
    between layers, returns its largest value.
    """
    try:
        return getattr(text, name, None)
    except Exception:  # transformers refuses to give one value for several
        return max(numbers_in(text, name), default=None)


def _experts(text: Any) -> Experts | None:
    number, active = (
        next((found for name in names if (found := getattr(text, name, None))), None)
        for names in (EXPERTS, ACTIVE)
    )
    if not number or not active or not getattr(text, "is_moe", True):
        return None
    ffn = _said(text, "moe_intermediate_size") or _said(text, "intermediate_size") or 0
    every = frozenset(range(text.num_hidden_layers))
    return Experts(number=number, active=active, ffn=ffn, layers=every, normalised=True)
