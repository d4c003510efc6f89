"""A model of any config.json that backend=fsdp accepts predicts a token from those before it alone:
each field of each type that is a number or true or false, at other values.
"""

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftmega.model_providers.transformers_decoders import refusal
from tests.families import ACCEPTED, TABLE, causal_types
from tests.family_configs import tiny_config

# the size of a model, of what it returns, or of what a run sets
LEFT_ALONE = {
    *("num_hidden_layers", "vocab_size", "hidden_size", "max_position_embeddings", "n_positions"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    "max_inference_chunksize",  # 0 is an endless loop of transformers
}
FEW = ("doge", "recurrent_gemma", "glm_moe_dsa")
KINDS = [
    each if each in FEW else pytest.param(each, marks=pytest.mark.ranks) for each in causal_types()
]
WITHOUT_CONFIG = ("musicgen", "musicgen_melody")  # they are built of other models
MEASURED = {row["type"]: row for row in json.loads(TABLE.read_text())["rows"]}
ROW = [5, 17, 3, 44, 9, 31, 12, 8, 27, 50, 2, 61]
OTHER = [33, 4, 19, 7, 58, 21, 40, 11, 6, 25, 13, 49]


def as_saved(config: Any) -> Any:
    """The content of its config.json."""
    return json.loads(config.to_json_string())


def variants(config: Any) -> Iterator[tuple[str, Any]]:
    """The config, and those with one field changed: the field's name and the config."""
    yield "", config
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if name in LEFT_ALONE or name.endswith("token_id"):
            continue
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = sorted({0, 1, 2, 3} - {value})
        for other in others:
            changed = copy.deepcopy(config)
            try:
                setattr(changed.get_text_config(), name, other)
            except Exception:  # of each class's own code: it takes no such value
                continue
            yield f"{name}={other}", changed


def built(config: Any) -> Any:
    """A model with random parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def logits(model: Any, *rows: list[int]) -> Tensor:
    found: Tensor = model(input_ids=torch.tensor(rows), use_cache=False).logits[0]
    return found


@torch.no_grad()
def differences(model: Any) -> dict[str, float]:
    """Of the logits of a row's tokens: with another last token, beside another row, without the last
    tokens; relative to the largest logit.
    """
    alone = logits(model, ROW)
    others = {
        "a later token": logits(model, [*ROW[:-1], 70])[:-1],
        "another row": logits(model, ROW, OTHER),
        "the length": logits(model, ROW[:8]),
    }
    scale = alone.abs().max()
    return {
        name: float((alone[: len(other)] - other).abs().max() / scale)
        for name, other in others.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_predicted_from_those_before_it_in_its_row_alone(kind: str) -> None:
    if kind in WITHOUT_CONFIG:
        return
    config = tiny_config(kind)
    for field, value in ACCEPTED.get(kind, {}).items():
        setattr(config, field, value)
    if refusal(as_saved(config)):
        assert kind not in FEW and MEASURED[kind]["verdict"] == "refused"
        return
    found = {}
    for name, changed in variants(config):
        if name and refusal(as_saved(changed)):
            continue
        try:
            seen = differences(built(changed))
        except Exception:
            if not name:
                raise
            continue  # it is no value, as each class's own code says
        finite = bool(torch.tensor([*seen.values()]).isfinite().all())
        assert finite or name
        if finite and max(seen.values()) > 1e-4:  # it may be the rounding of float32
            with contextlib.suppress(RuntimeError):  # some classes compute parts in float32 alone
                seen = differences(built(changed).double())
        if finite:
            found |= {f"{name} {what}": size for what, size in seen.items() if size > 1e-4}
    assert not found
