"""Freezes the row of the padding token in Megatron's embedding, as in transformers.

A policy may sample that token. Its row is often zeros, where a norm's gradient is a thousand times
those of other rows: it alone would determine the clipping of all gradients.
"""

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor


def freeze_padding(embedding: VocabParallelEmbedding, token: int) -> None:
    """Stops the gradient from lookups of a token in the embedding.

    If the LM head is the same matrix, the row still has the head's gradient.
    """
    embedding.padding_token = token
    embedding.register_forward_hook(partial(_without_gradient, token=token))


def _without_gradient(
    embedding: Any, given: tuple[Tensor, ...], output: Tensor, *, token: int
) -> None:
    """Zeros the gradient of the output at the token's positions, in the output's layout: [b, s,
    hidden], or [s / ranks, b, hidden] under sequence parallelism.
    """
    if not output.requires_grad:
        return
    here = given[0] == token
    if embedding.reduce_scatter_embeddings:
        group = embedding.tp_group
        here = here.T.chunk(group.size())[group.rank()]
    places = here[..., None]
    output.register_hook(lambda gradient: gradient.masked_fill(places, 0))
