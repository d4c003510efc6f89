"""Stops the gradient of the padding token's row in Megatron's embedding, as in transformers.

A policy may sample the padding token. Its embedding row is often zeros, where a norm's gradient is
about a thousand times that of other rows: this row alone would determine how all gradients are
clipped.
"""

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor


def freeze_padding(embedding: VocabParallelEmbedding, token: int) -> None:
    """Keeps embedding lookups of the token id `token` from sending a gradient to the token's
    embedding row.

    If the LM head is tied to the embedding, the row still gets the LM head's gradient.
    """
    embedding.padding_token = token
    embedding.register_forward_hook(partial(_without_gradient, token=token))


def _without_gradient(
    embedding: Any, given: tuple[Tensor, ...], output: Tensor, *, token: int
) -> None:
    """Registers a hook on the embedding's output that zeros the gradient at the token's positions;
    the output is [b, s, hidden], or [s / ranks, b, hidden] under sequence parallelism.
    """
    if not output.requires_grad:
        return
    here = given[0] == token
    if embedding.reduce_scatter_embeddings:
        group = embedding.tp_group
        here = here.T.chunk(group.size())[group.rank()]
    places = here[..., None]
    output.register_hook(lambda gradient: gradient.masked_fill(places, 0))
