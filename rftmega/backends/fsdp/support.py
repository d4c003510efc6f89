"""Determines whether a transformers decoder supports packed rows, before its weights are loaded.
There is no list of architectures: the model's own code runs on the meta device, and the calls that
it makes decide. `model_providers.output_head` examines its logits in the same way.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rftmega.backends.decoder.meta_decoder import vocabulary_of
from rftmega.backends.fsdp.packed_attention import ATTENTION, EDGES, Edges, Unpackable, attend_rows
from rftmega.core.errors import described

SLIDING, FULL = "sliding_attention", "full_attention"
PROBE = [0, 3, 5]  # edges of the probe rows
SAID = 160  # characters of an error of transformers' code that are shown


def refusal_to_pack(model: PreTrainedModel) -> str | None:
    """Returns the reason why a model's rows can't be packed, or None if they can; the model is on
    the meta device and uses `attend_rows`.
    Every layer must call the attention function once, with a window where the config says so, and
    no other operation may mix tokens.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {SLIDING, FULL}:
        return f"it has layers of type {sorted(others)[0]}"
    words = vocabulary_of(model)
    if getattr(config, "attention_chunk_size", None):
        return "its attention is within chunks"
    if "position_ids" not in signature(words.forward).parameters:
        return "it takes no positions"
    if getattr(model, "_is_stateful", False):
        return "its layers carry a state"
    mixing = [each for each in words.modules() if isinstance(each, nn.Conv1d | nn.RNNBase)]
    if mixing:
        return f"it has {type(mixing[0]).__name__} over tokens"
    windows: list[int | None] = []

    def noted(module: nn.Module, *given: Any, **named: Any) -> Any:
        windows.append(named.get("sliding_window"))
        return attend_rows(module, *given, **named)

    try:
        _run_on_meta(model, noted)
    except Unpackable as error:
        return str(error)
    layers = config.num_hidden_layers
    if len(windows) != layers:
        return f"{len(windows)} of its {layers} layers take their attention from where it is chosen"
    if sum(window is not None for window in windows) != _windowed(config):
        return "its attention is not told its window"
    return None


def _windowed(config: Any) -> int:
    """Returns the number of layers with sliding-window attention according to the config."""
    kinds = getattr(config, "layer_types", None)
    if not getattr(config, "sliding_window", None):
        return 0
    if kinds is not None:
        return sum(kind == SLIDING for kind in kinds)
    used: bool = getattr(config, "use_sliding_window", True)
    return config.num_hidden_layers if used else 0


def _run_on_meta(model: PreTrainedModel, attention: Callable[..., Any]) -> None:
    kept = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    experts = model.get_experts_implementation()
    if experts[""] is not None:
        model.set_experts_implementation(
            "batched_mm"
        )  # other implementations fail on the meta device
    positions = [
        position for a, b in zip(PROBE, PROBE[1:], strict=False) for position in range(b - a)
    ]
    try:
        vocabulary_of(model)(
            input_ids=torch.zeros(1, PROBE[-1], dtype=torch.int64, device="meta"),
            position_ids=torch.tensor([positions], device="meta"),
            use_cache=False,
            **{EDGES: Edges(PROBE)},
        )
    except Unpackable:
        raise
    except Exception as error:
        # without the advice that torch's messages go on to give
        first = described(error).partition(". ")[0].partition("\n")[0].rstrip(".")[:SAID]
        raise Unpackable(f"transformers' code of it takes no packed rows ({first})") from error
    finally:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, kept)
        model.set_experts_implementation(experts)
