"""Determines how a transformers decoder computes its logits, before its weights are loaded.
Log-probs are computed here without logits, from a linear layer with an optional bias, and a scale
factor before and after it. The model's own forward pass runs with substitutes for the decoder and
the LM head, which shows whether its logits are computed in this way. They may also be soft-capped
(Gemma 2, arXiv:2408.00118, section 2).
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rftmega.core.errors import CheckpointError

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

LARGEST, SMALLEST = 1e4, 1e-2  # magnitudes of the probe logits, of both signs


class OutputHead(NamedTuple):
    """OutputHead describes how logits are computed from hidden states: x = after * linear(before *
    hidden), and with a `cap` cap * tanh(x / cap).
    """

    linear: nn.Linear
    before: float = 1.0
    after: float = 1.0
    cap: float | None = None


def output_head(model: "PreTrainedModel") -> OutputHead:
    """Returns the LM head of a model, which may be on the meta device, with its scale factors.

    Raises CheckpointError, naming the model's class, if the model computes its logits in another
    way, such as omitting some.
    """
    kind, linear = type(model).__name__, model.get_output_embeddings()
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise _refused(kind, f"its output head is {type(linear).__name__}, no linear layer")
    words, width = linear.weight.shape
    hidden = torch.linspace(-1.0, 1.0, width)[None, None]
    told = _spread(words)[None, None]
    seen: list[Tensor] = []

    def noted(given: Tensor) -> Tensor:
        seen.append(given)
        return told

    def given(*_: Any, **__: Any) -> Any:
        return _given_output()(last_hidden_state=hidden)

    embedding = model.get_input_embeddings()
    holders = [each for each in model.modules() if embedding in each.children()]
    decoders = {id(each): each for each in [decoder_of(model), *holders] if each is not model}
    computed: list[str] = []  # modules beside decoder and head, in the order of their calls
    own = {id(each) for part in (*decoders.values(), linear) for each in part.parameters()}
    beside = {name: each for name, each in model.named_parameters() if id(each) not in own}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: computed.append(name)
        )
        for name in dict.fromkeys(each.rpartition(".")[0] for each in beside)
    ]
    try:
        with torch.no_grad(), ExitStack() as replaced:
            for decoder in decoders.values():  # a model may call the inner one
                replaced.enter_context(_in_place_of(decoder, given))
            replaced.enter_context(_in_place_of(linear, noted))
            logits = model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits
    except Exception as error:  # model code may raise anything if weights are missing
        last = computed[-1] if computed else ""  # it has parameters, which have no memory
        used = [name for name in beside if name.rpartition(".")[0] == last] or [*beside]
        why = f"it computes with {used[0]}, too" if used else str(error)
        raise _refused(
            kind, f"its forward pass does more than call decoder and output head: {why}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 1:
        raise _refused(kind, f"it calls its output head {len(seen)} times")
    before = _factor(seen[0], hidden)
    if before is None:
        raise _refused(kind, "it changes the hidden states before the output head has them")
    if logits.shape != told.shape:
        raise _refused(kind, f"it gives {logits.shape[-1]} of the {words} logits")
    after = _factor(logits, told)
    if after is not None:
        return OutputHead(linear, before, after)
    if (found := _soft_cap(logits, told)) is None:
        raise _refused(
            kind,
            "it does not take the logits as its output head gives them: it changes them otherwise than by a factor and a "
            "soft cap",
        )
    return OutputHead(linear, before, *found)


def decoder_of(model: "PreTrainedModel") -> nn.Module:
    """Returns the decoder of a causal language model: the model without its LM head.

    Raises CheckpointError if no module of the model is its decoder.
    """
    embedding = model.get_input_embeddings()
    named = getattr(model, model.base_model_prefix, None)
    for child in [named, *model.children()]:
        if isinstance(child, nn.Module) and any(each is embedding for each in child.modules()):
            return child
    raise _refused(type(model).__name__, "none of its modules is a decoder with the embedding")


def names_of_head(model: "PreTrainedModel") -> list[str]:
    """Returns the names of the LM head's tensors in a checkpoint: [name of the weight, name of the
    bias]. The weight may be tied to the embedding.
    """
    head = model.get_output_embeddings()
    (name,) = [name for name, module in model.named_modules() if module is head]
    return [f"{name}.weight", f"{name}.bias"]


def _refused(kind: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{kind} can't be trained with backend=fsdp: {reason}. Log-probs are made without logits here, from a linear layer, its "
        "bias and a factor, so this can't be honoured. Take another model."
    )


def _spread(number: int) -> Tensor:
    """Returns `number` probe logits of both signs, from small to so large that any bound on logits
    would change them.
    """
    half = torch.logspace(0, 1, (number + 1) // 2, base=LARGEST / SMALLEST) * SMALLEST
    return torch.cat([-half.flip(0), half])[:number]


def _factor(found: Tensor, given: Tensor) -> float | None:
    """Returns the nonzero factor by which `given` must be multiplied to get `found`, or None if
    there is no such factor.
    """
    if found.shape != given.shape or found.is_meta:
        return None
    factor = float(found[0, 0, 0] / given[0, 0, 0])
    same = torch.allclose(found.float(), given * factor, rtol=1e-5, atol=1e-6)
    return factor if same and factor else None


def _soft_cap(found: Tensor, given: Tensor) -> tuple[float, float] | None:
    """Returns (factor, cap) for which `found` is cap * tanh(factor * given / cap), or None if there
    are none. The largest of `given` must be so large that tanh is 1 there.
    """
    if found.shape != given.shape or found.is_meta:
        return None
    cap = float(found.abs().max())
    small = int(given.abs().argmin())
    first, seen = float(given.flatten()[small]), float(found.flatten()[small])
    if not 0 < abs(seen) < cap:
        return None
    factor = cap * math.atanh(seen / cap) / first
    wanted = cap * torch.tanh(factor * given / cap)
    same = torch.allclose(found.float(), wanted, rtol=1e-5, atol=1e-6)
    return (factor, cap) if same else None


@functools.cache
def _given_output() -> type[Any]:
    """Returns the class of the outputs of the substitute decoder, in which all fields but the
    hidden states are None.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class GivenOutput(MoeModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            """Returns None for the decoder's outputs other than hidden states, such as the cache."""
            if name.startswith("_"):
                raise AttributeError(name)

    return GivenOutput


@contextmanager
def _in_place_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's forward method by `forward` within a `with` block."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
