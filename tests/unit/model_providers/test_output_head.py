"""What is found of how a model makes its logits, against what it was made to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rftmega.backends.decoder.describe import read_config
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.output_head import decoder_of, names_of_head, output_head
from rftmega.model_providers.transformers_decoders import on_meta
from tests.family_configs import tiny_config
from tests.tiny_decoders import VOCABULARY, save_decoder

CHANGED = "otherwise than by a factor and a soft cap"
Change = Callable[[Tensor], Any]


def built(folder: Path, family: str = "llama") -> PreTrainedModel:
    return on_meta(read_config(save_decoder(folder, family)), "eager")


def changed_logits(model: PreTrainedModel, change: Change) -> None:
    """Has the model change its logits once it has them."""
    plain = model.forward

    def forward(*given: Any, **named: Any) -> Any:
        completion = plain(*given, **named)
        completion.logits = change(completion.logits)
        return completion

    vars(model)["forward"] = forward


class BesideHead(nn.Linear):
    """BesideHead is an output head that is no plain linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.normalize(x))


class Prepared(nn.Module):
    """Prepared changes hidden states, and calls the head then."""

    def __init__(self, head: nn.Linear, change: Change):
        super().__init__()
        self.head, self.change = head, change

    def forward(self, x: Tensor) -> Tensor:
        completion: Tensor = self.head(self.change(x))
        return completion


@pytest.mark.parametrize(
    ("family", "bias", "before", "after"),
    [
        ("llama", False, 1.0, 1.0),
        ("phi", True, 1.0, 1.0),
        ("phimoe", True, 1.0, 1.0),
        ("codegen", True, 1.0, 1.0),
        ("granite", False, 1.0, 0.25),
        ("cohere", False, 1.0, 0.25),
    ],
)
def test_bias_and_scale_of_the_output_head_are_found(
    family: str, bias: bool, before: float, after: float, tmp_path: Path
) -> None:
    model = built(tmp_path, family)
    head = output_head(model)
    assert head.linear is model.get_output_embeddings()
    assert (head.linear.bias is not None) == bias
    assert (head.before, head.after) == pytest.approx((before, after))
    assert "forward" not in vars(head.linear) and "forward" not in vars(model.base_model)


def test_a_scale_before_the_head_is_told_from_one_behind_it(tmp_path: Path) -> None:
    model = built(tmp_path, "phi")
    linear = model.lm_head
    model.get_output_embeddings = lambda: linear  # type: ignore[method-assign]
    model.lm_head = Prepared(linear, lambda hidden: 3 * hidden)
    changed_logits(model, lambda logits: logits / 2)
    assert output_head(model)[1:3] == pytest.approx((3.0, 0.5))
    assert output_head(model).cap is None


@pytest.mark.parametrize(("after", "cap"), [(1.0, 30.0), (0.25, 50.0), (3.0, 15.0)])
def test_a_soft_cap_is_found_with_its_scale(after: float, cap: float, tmp_path: Path) -> None:
    model = built(tmp_path)
    changed_logits(model, lambda x: cap * torch.tanh(after * x / cap))
    head = output_head(model)
    assert (head.before, head.after, head.cap) == pytest.approx((1.0, after, cap))


@pytest.mark.parametrize("family", ["opt", "bart", "llama4_text"])
def test_the_head_of_a_model_that_calls_its_inner_decoder_is_found(
    family: str, tmp_path: Path
) -> None:
    model = on_meta(tiny_config(family), "eager")
    assert output_head(model).linear is model.get_output_embeddings()
    decoder = decoder_of(model)
    assert decoder is not model
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: 30 * torch.tanh(x / 30) + 0.1, CHANGED),
        (lambda x: 30 * torch.erf(x / 30), CHANGED),
        (lambda x: x.clamp(-5000, 5000), CHANGED),
        (lambda x: x + 0.01, CHANGED),
        (lambda x: x + torch.arange(VOCABULARY), CHANGED),
        (lambda x: 0 * x, CHANGED),
        (lambda x: x[..., :-3], f"gives {VOCABULARY - 3} of the {VOCABULARY} logits"),
        (lambda x: torch.cat([x, x[..., :3]], -1), f"gives {VOCABULARY + 3} of the"),
    ],
    ids=["moved cap", "another cap", "bound", "constant", "bias", "nothing", "slice", "more"],
)
def test_what_no_linear_head_computes_is_refused_by_name(
    change: Change, said: str, tmp_path: Path
) -> None:
    model = built(tmp_path)
    changed_logits(model, change)
    with pytest.raises(CheckpointError, match=said) as caught:
        output_head(model)
    assert str(caught.value).startswith("LlamaForCausalLM can't be trained with backend=fsdp")


def test_changed_hidden_states_are_refused(tmp_path: Path) -> None:
    model = built(tmp_path)
    linear = model.lm_head
    model.get_output_embeddings = lambda: linear  # type: ignore[method-assign]
    model.lm_head = Prepared(linear, nn.functional.normalize)
    with pytest.raises(CheckpointError, match="changes the hidden states before"):
        output_head(model)
    model.lm_head = Prepared(linear, lambda x: linear(x)[..., :32])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="calls its output head 2 times|does more than"):
        output_head(model)


@pytest.mark.parametrize("tied", [False, True])
def test_the_refusal_names_a_parameter_that_is_computed_with(tied: bool) -> None:
    """Untied, nothing reads lm_head.bias, which comes first."""
    config = tiny_config("roberta-prelayernorm")
    config.is_decoder, config.tie_word_embeddings = True, tied
    with pytest.raises(CheckpointError, match=r"it computes with lm_head.dense.weight, too"):
        output_head(on_meta(config, "eager"))


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = built(tmp_path)
    with torch.device("meta"):
        model.lm_head = BesideHead(32, VOCABULARY)
    with pytest.raises(CheckpointError, match="its output head is BesideHead, no linear layer"):
        output_head(model)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "phi", "codegen"])
def test_the_heads_tensors_are_named_as_in_the_folder(family: str, tmp_path: Path) -> None:
    assert names_of_head(built(tmp_path, family)) == ["lm_head.weight", "lm_head.bias"]
