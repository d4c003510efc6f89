"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053) according to transformers' own plan of a
model (`decoder.tensor_plan`).
A process's share of a parameter is an ordinary, smaller parameter, which FSDP2 then shards like any
other.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rftmega.backends.decoder.tensor_plan import (
    COLUMN,
    COLUMN_GATHERED,
    EXPERTS,
    ROW,
    ROW_OF_WHOLE,
    VOCABULARY,
    Split,
)
from rftmega.backends.fsdp.exchanges import copied, joined, own_columns, summed
from rftmega.backends.fsdp.module import LogProbHead, Network
from rftmega.models.kernels.linear_log_probs import VocabularyShard
from rftmega.models.lora.linear import LinearWithPair

Forward = Callable[..., Tensor]


def share_layers(
    network: Network,
    model: PreTrainedModel,
    styles: dict[str, str],
    splits: dict[str, Split],
    group: Any,
) -> None:
    """Replaces each parameter in `splits` by this process's share, and adds the necessary
    communication over the process group `group` to the forward passes of the affected modules.

    `styles` and `splits` are the results of `decoder.tensor_plan.styles_of` and `splits_of`.
    `network` contains the modules of `model`, which is on the meta device.
    """
    shares: dict[int, nn.Parameter] = {}  # by id of the whole parameter: tied ones stay tied
    for name, split in splits.items():
        owner, _, own_name = name.rpartition(".")
        whole = model.get_parameter(name)
        if id(whole) not in shares:
            shares[id(whole)] = nn.Parameter(whole.new_empty(split.of(tuple(whole.shape))))
        setattr(model.get_submodule(owner), own_name, shares[id(whole)])
    embedding, head = model.get_input_embeddings(), network.head
    for name, style in styles.items():
        if name in splits:
            continue  # a parameter
        module: Any = model.get_submodule(name)
        if style in (COLUMN, COLUMN_GATHERED):
            module.forward = _columns(module, group, joins=style == COLUMN_GATHERED)
        elif style in (ROW, ROW_OF_WHOLE):
            module.forward = _rows(module, group, of_whole=style == ROW_OF_WHOLE)
        elif style == EXPERTS:
            module.forward = _experts(module.forward, group)
        elif style == VOCABULARY:
            ((first, stop),) = splits[f"{name}.weight"].slices
            if module is embedding:
                module.forward = _words(module, group, first, stop)
            elif isinstance(head, LogProbHead):
                head.shard = VocabularyShard(first, stop - first, group)


def _columns(module: Any, group: Any, *, joins: bool) -> Forward:
    linear: Forward = module.forward

    def forward(x: Tensor) -> Tensor:
        output = linear(copied(x, group))
        return joined(output, group) if joins else output

    return forward


def _rows(module: Any, group: Any, *, of_whole: bool) -> Forward:
    def forward(x: Tensor) -> Tensor:
        own = own_columns(x, group) if of_whole else x
        part = functional.linear(own, module.weight)
        if isinstance(module, LinearWithPair):
            part = module.with_product(own, part)
        output = summed(part, group)
        whole: Tensor = output if module.bias is None else output + module.bias
        return whole

    return forward


def _experts(moe: Forward, group: Any) -> Forward:
    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor, *more: Any) -> Tensor:
        return summed(moe(copied(hidden, group), chosen, copied(weights, group), *more), group)

    return forward


def _words(embedding: Any, group: Any, first: int, stop: int) -> Forward:
    """Returns a forward function for `embedding` that looks up vocabulary rows first ... stop - 1
    on this process, and sums the results over the processes of `group`, which hold the other rows.
    """
    looked_up: Forward = embedding.forward
    padding = embedding.padding_idx  # the token whose row is not trained
    here = padding is not None and first <= padding < stop
    embedding.padding_idx = padding - first if here else None

    def forward(ids: Tensor) -> Tensor:
        own = (ids >= first) & (ids < stop)
        found = looked_up((ids - first).where(own, 0))
        return summed(found.where(own[..., None], 0), group)

    return forward
