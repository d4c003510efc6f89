"""Decides which models of transformers backend=fsdp trains, from config.json alone."""

import json
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rftmega.core.errors import CheckpointError
from rftmega.model_providers.output_head import decoder_of, output_head

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

# Vision-language models whose images `rftmega.data.media` supports. Not qwen3_vl_moe: transformers
# transposes its experts, which then are no blocks of the folder's tensors.
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# types that transformers builds and backend=fsdp can't train -> why
UNSUPPORTED = {
    "cpmant": "its tokens see later ones, so none can be predicted from what came before",
    "minimax": "transformers 5.19 gives its first tokens other logits in a longer sequence",
    "reformer": "its attention by hashing is random and takes sequences of a fixed length",
    "xlnet": "it predicts tokens from those before and behind them, in random order",
}
# (type, field of config.json) -> values with which it can't be trained, and why
UNSUPPORTED_VALUES = {
    ("doge", "is_moe"): (True, "an expert is chosen for a token by what other sequences contain"),
}
PREFIX = "prefix_lm"
# fields of config.json that say which tokens a token sees -> value of a causal decoder
CAUSAL = {
    "use_bidirectional_attention": False,
    "causal": True,
    "is_causal": True,
    PREFIX: False,
}
# fields with the number of tokens that a token attends to; 0 makes transformers attend to later ones
WINDOW = "sliding_window"
NUMBERS_SEEN = ("attention_window_size", WINDOW, "keep_window_size", "index_topk")
TOWERS = ("vision_config", "audio_config")
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


def refusal(fields: Mapping[str, Any]) -> str:
    """Returns the reason why backend=fsdp can't train the model of config.json, whose content is
    `fields`; "" if it can. The model is built without memory.
    """
    kind = fields.get("model_type")
    if unknown := unknown_to_transformers(kind):
        return unknown
    if kind is None:
        return "config.json has no model_type"
    try:
        config = _read(fields)
        if reason := refusal_of_config(config) or without_sizes(config):
            return reason
        model = on_meta(config, "eager")
        refuse_bidirectional(model)
        output_head(model)
        refuse_shared(model, layers_of(model))
    except Exception as error:  # of each class's own code, given a user's file
        return " ".join(str(error).split())
    return ""


def _read(fields: Mapping[str, Any]) -> Any:
    """Returns transformers' config of the content of a config.json, as it reads the file."""
    from transformers import AutoConfig

    given = {name: value for name, value in fields.items() if name != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(given))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def unknown_to_transformers(kind: Any) -> str:
    """Returns an error message if transformers has no models of a model_type, otherwise an empty
    string. A missing model_type (None) is no error here.
    """
    from transformers import CONFIG_MAPPING

    if kind is None or (isinstance(kind, str) and kind in CONFIG_MAPPING):
        return ""
    return f"transformers {metadata.version('transformers')} has no model_type={kind} (code that a folder brings is not run)"


def refusal_of_config(config: Any) -> str:
    """Returns the reason why backend=fsdp can't train models of transformers' config `config`, as
    far as its fields say; "" if they say none.
    """
    kind = config.model_type
    text = config.get_text_config()
    others = text is not config or any(hasattr(config, name) for name in TOWERS)
    if (others or kind in types_with_media()) and kind not in SEEING:
        return (
            f"model_type={kind} has more than a decoder of text, and backend=fsdp trains such models of these types only: "
            f"{', '.join(SEEING)}.{_decoder_alone(text, kind)}"
        )
    if kind not in (*SEEING, *causal_types()):
        return (
            f"transformers has no language model of model_type={kind} that continues a text alone (a class of "
            "AutoModelForCausalLM)."
        )
    if why := UNSUPPORTED.get(kind):
        return f"model_type={kind} can't be trained with backend=fsdp: {why}."
    for (of, field), (value, why) in UNSUPPORTED_VALUES.items():
        if kind == of and getattr(config, field, None) == value:
            given = f"{field}={str(value).lower()}"
            return f"model_type={kind} with {given} can't be trained with backend=fsdp: {why}."
    kinds = getattr(text, "layer_types", None) or ["sliding"]
    slides = any("sliding" in str(kind) for kind in kinds)
    for field in NUMBERS_SEEN:
        unread = field == WINDOW and not slides
        if getattr(text, field, None) == 0 and not unread:
            return f"{field}=0: a token attends to none, not to itself either. Correct config.json."
    for field, causal in CAUSAL.items():
        if getattr(config, field, causal) not in (causal, None):
            given = f"{field}={str(getattr(config, field)).lower()}"
            if field == PREFIX:
                return (
                    f"{given}: the tokens of a prompt see each other in both directions, which neither training nor generation "
                    f"does here. Set {field}=false in config.json to train and use the model as a causal decoder."
                )
            return (
                f"{given}: tokens see later ones, so none can be predicted from what came before."
            )
    return ""


def refuse_bidirectional(model: "PreTrainedModel") -> None:
    """Raises CheckpointError if self-attention of a built decoder sees later tokens, as that of
    BERT's classes does unless is_decoder is set.
    """
    kind = type(model).__name__
    for name, module in decoder_of(model).named_modules():
        for field in ("is_decoder", "causal"):
            if vars(module).get(field) is False:
                raise CheckpointError(
                    f"{kind}: {field}=false in {name}, so tokens see later ones, and none can be predicted from what came "
                    f"before. Set {field}=true in config.json if the model was trained so; otherwise take a causal decoder."
                )


def without_sizes(config: Any) -> str:
    """Returns an error message if transformers' config lacks a size of the model, otherwise ""."""
    text = config.get_text_config()
    if missing := [name for name in SIZES if not _says(text, name)]:
        return (
            f"model_type={config.model_type}: transformers' config has no {' and no '.join(missing)}, so backend=fsdp can't "
            "build the model."
        )
    return ""


def _says(text: Any, name: str) -> bool:
    try:
        return getattr(text, name, None) is not None
    except Exception:  # transformers refuses to give one value for several
        return True


def causal_types() -> Mapping[str, str]:
    """Returns the model types of AutoModelForCausalLM, with the names of their classes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def types_with_media() -> set[str]:
    """Returns the model types that write text and have no class for text alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(causal_types())


def _decoder_alone(text: Any, kind: str) -> str:
    """Returns advice to take the folder of a decoder whose config is `text`, if transformers has a
    class of it that is not the refused one, of type `kind`.
    """
    if text.model_type not in causal_types() or text.model_type == kind:
        return ""
    return f" The folder of its decoder alone (model_type={text.model_type}) is a model of its own."


def on_meta(config: Any, attention: str) -> "PreTrainedModel":
    """Builds the decoder of a config in float32, with the attention implementation `attention` in
    its text layers and SDPA in a vision encoder.
    Raises ValueError or ImportError if transformers can't use this attention implementation.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = config.model_type in SEEING
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    chosen = {"text_config": attention, "vision_config": "sdpa"} if sees else attention
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(
            config, dtype=torch.float32, attn_implementation=chosen, trust_remote_code=False
        )
    model.tie_weights()
    return model.eval()


def layers_of(model: "PreTrainedModel") -> list[nn.Module]:
    """Returns a model's layers, including those of a vision encoder.

    Where transformers does not name the class of the layers, they are the longest list of modules
    of one class. Raises CheckpointError if there is none.
    """
    kinds = set(model._no_split_modules or ())
    decoder = decoder_of(model)
    named = [each for each in decoder.modules() if type(each).__name__ in kinds]
    inner = {id(part) for each in named for part in each.modules() if part is not each}
    layers = [each for each in named if id(each) not in inner]
    if not layers:
        lists = [each for each in decoder.modules() if isinstance(each, nn.ModuleList)]
        alike = [list(each) for each in lists if len({type(layer) for layer in each}) == 1]
        layers = max(alike, key=len, default=[])
    if not layers:
        raise CheckpointError(
            f"transformers does not say which modules of {type(model).__name__} are its layers (_no_split_modules), so "
            "nothing could be gathered layer by layer. Take another model."
        )
    return layers


def refuse_shared(model: "PreTrainedModel", layers: list[nn.Module]) -> None:
    """Raises CheckpointError if layers share a parameter, which could not be gathered for each of
    them.
    """
    seen: set[int] = set()
    for layer in layers:
        own = {id(parameter) for parameter in layer.parameters()}
        if own & seen:
            raise CheckpointError(
                f"{type(model).__name__} has layers that share their weights, and each layer is gathered by itself "
                "with backend=fsdp. Take another model."
            )
        seen |= own
