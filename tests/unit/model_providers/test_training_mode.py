"""Models of transformers learn as they score, whatever their config.json says that they drop."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rftmega.converters.dropout_fields import drops
from rftmega.model_providers.training_mode import allow_recomputation, learn
from rftmega.model_providers.transformers_decoders import layers_of
from tests.tiny_decoders import FAMILIES, tiny

TOKENS = torch.arange(12)[None] % 97
SMALL = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
}


class Draws(TorchDispatchMode):
    """Notes operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        shares = [each for each in (*given, *(named or {}).values()) if isinstance(each, float)]
        attends = "scaled_dot_product" in str(function)
        if torch.Tag.nondeterministic_seeded in function.tags and (not attends or any(shares[:1])):
            self.seen.append(str(function))
        return function(*given, **(named or {}))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def dropping(family: str) -> Any:
    """A tiny decoder whose config drops half of everything; None where it can't be small."""
    config_class = next(each for each in MODEL_FOR_CAUSAL_LM_MAPPING if each.model_type == family)
    try:
        config = config_class(**SMALL)
        for name, value in vars(config).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if drops(name, family=family) and (number or value is None):
                setattr(config, name, 0.5)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if model.get_experts_implementation()[""] is not None:
            model.set_experts_implementation("batched_mm")  # the others fail on the meta device
        return model
    except Exception:  # a family of other names, or with parts that are not small
        return None


def drawn(model: Any) -> list[str]:
    with Draws() as draws:
        tokens = TOKENS.to("meta")
        model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    return draws.seen


@pytest.mark.ranks
def test_no_decoder_of_transformers_draws_a_number_while_it_learns() -> None:
    looked_at, would_draw = [], []
    for family in sorted({each.model_type for each in MODEL_FOR_CAUSAL_LM_MAPPING}):
        model = dropping(family)
        if model is None:
            continue
        try:
            plain = drawn(model.train())
        except Exception:  # it can't be run on the meta device
            continue
        allow_recomputation(model) if model.supports_gradient_checkpointing else None
        for learning in (True, False):
            learn(model, learning)
            assert drawn(model) == [], (family, learning)
        looked_at.append(family)
        would_draw += [family] if plain else []
    assert len(looked_at) > 90
    assert len(would_draw) > 80, "the models drop nothing by themselves, so nothing was shown"


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3-tied"}))
def test_a_layer_is_computed_again_and_gives_the_gradients_of_a_model_that_drops_nothing(
    family: str,
) -> None:
    plain, model = tiny(family), tiny(family)
    for name in vars(model.config):
        if drops(name):
            setattr(model.config, name, 0.5)
    for module in model.modules():
        for name in set(vars(module)) & {"attention_dropout", "jitter_noise", "resid_attn_dropout"}:
            setattr(module, name, 0.5)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    allow_recomputation(model)
    learn(model, True)
    calls: list[int] = []
    first, again = (layers_of(each)[0].mlp for each in (plain, model))
    again.register_forward_pre_hook(lambda *_: calls.append(1))
    assert first is not again
    for each in (plain.eval(), model):
        each(TOKENS, use_cache=False).logits.float().log_softmax(-1)[..., 5].sum().backward()
    assert len(calls) == 2, "the layer was not computed again"
    for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, msg=name)
    learn(model, False)
    model(TOKENS, use_cache=False)
    assert len(calls) == 3
    assert not any(module.training for module in model.modules())
