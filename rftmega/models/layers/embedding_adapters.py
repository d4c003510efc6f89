"""LoRA adapters (arXiv:2106.09685) on the embedding and on the LM head, whose vocabulary is split
over tensor-parallel ranks.
The embedding is treated as a row-parallel layer of one-hot inputs, the LM head as a column-parallel
layer.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

from rftmega.models.layers.adapter import LowRankAdapter


class EmbeddingAdapter(LowRankAdapter):
    """EmbeddingAdapter is a LoRA adapter on the embedding, with `a` [rank, vocabulary rows of this
    process] and `b` [hidden, rank]; it has no dropout, as in PEFT.
    """

    def __init__(self, embedding: VocabParallelEmbedding, *, rank: int, scaling: float):
        """Creates the adapter of `embedding` with zero matrices."""
        weight = embedding.weight
        super().__init__(
            weight.T,
            torch.ones(weight.shape[1], 1),
            rank=rank,
            scaling=scaling,
            dropout=0.0,
            row_parallel=True,
            sequence_parallel=embedding.reduce_scatter_embeddings,
            of_expert=False,
            group=embedding.tp_group,
        )
        self.words = embedding.vocab_start_index, embedding.vocab_end_index
        self.padding: int | None = getattr(embedding, "padding_token", None)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the adapter's output for token ids [b, s], in the layout of the embedding's
        output: [b, s, hidden], or [s / ranks, b, hidden] under sequence parallelism.
        """
        first, stop = self.words
        here = (ids >= first) & (ids < stop)
        # torch's embedding sums its gradient in any order on a GPU
        found = self.a.T[torch.where(here, ids - first, 0)]
        if self.padding is not None:  # its row learns nothing, as in PEFT
            found = torch.where((ids == self.padding)[..., None], found.detach(), found)
        found = found.masked_fill(~here[..., None], 0.0)
        if self.sequence_parallel:
            found = found.transpose(0, 1).contiguous()
        return self.scaling * F.linear(self._summed(found), self.b)

    def delta(self, rows: slice, columns: slice) -> Tensor:
        """Returns the adapter's delta for the given rows and columns of the weight [vocabulary,
        hidden], in float32.
        """
        return super().delta(columns, rows).T


class HeadAdapter(LowRankAdapter):
    """HeadAdapter is a LoRA adapter on the LM head, with `a` [rank, hidden] and `b` [vocabulary
    rows of this process, rank].
    """

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns (scaling * a x [s, b, rank] for the hidden states x of all tokens, b); the
        product of both is what the adapter adds to the logits.

        `given`: hidden states x [s, b, hidden], under sequence parallelism this rank's tokens only.
        `linear_stats` never materialises this product.
        """
        inner = self._for_shards(F.linear(self._dropped(given), self.a))
        return self.scaling * inner, self.by_pair()


def adapt_embedding(embedding: VocabParallelEmbedding, adapter: EmbeddingAdapter) -> None:
    """Attaches an adapter to an embedding: its output is added to the embedding's."""
    embedding.lora = adapter
    embedding.register_forward_hook(_added_to_vectors)


def adapt_head(head: nn.Module, adapter: HeadAdapter) -> None:
    """Attaches an adapter to an LM head: its output is added to the logits [s, b, vocabulary]."""
    head.lora = adapter
    head.register_forward_hook(_added_to_logits)


def pair_of_head(chunk: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the two factors ([N, rank], [vocabulary, rank]) of what the LM head's adapter adds to
    the logits, for hidden states [s, b, hidden]; None without an active adapter.
    `chunk`: the pipeline chunk that contains the LM head.
    """
    adapter = getattr(chunk.output_layer, "lora", None)
    if adapter is None or adapter.off:
        return None
    inner, b = adapter(hidden)
    return inner[:, 0], b


def _added_to_vectors(embedding: Any, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    if embedding.lora.off:
        return output
    added: Tensor = embedding.lora(given[0])
    return output + added


def _added_to_logits(head: Any, given: tuple[Tensor, ...], output: Any) -> Any:
    if head.lora.off:
        return output
    logits, bias = output
    inner, b = head.lora(given[0])
    return logits + F.linear(inner, b), bias
