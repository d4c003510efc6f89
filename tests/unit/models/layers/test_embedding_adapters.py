"""Adapters on Megatron's embedding, of which one process has all words."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rftmega.models.layers.embedding_adapters import EmbeddingAdapter


def test_an_embeddings_adapter_learns_nothing_from_the_padding_token_as_pefts() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 5))
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    embedding: Any = SimpleNamespace(
        weight=weight, reduce_scatter_embeddings=False, tp_group=alone,
        vocab_start_index=0, vocab_end_index=7, padding_token=3,
    )  # fmt: skip
    adapter: Any = EmbeddingAdapter(embedding, rank=2, scaling=3.0)
    adapter._summed = lambda found: found  # over tensor-parallel ranks, of which there is one
    with torch.no_grad():
        adapter.a.normal_()
        adapter.b.normal_()
    ids, weights = torch.tensor([[6, 0], [3, 3]]), torch.randn(2, 2, 5)
    (adapter(ids) * weights).sum().backward()
    a, b = (matrix.detach().clone().requires_grad_() for matrix in (adapter.a, adapter.b))
    found = F.embedding(ids, a.T, padding_idx=3)  # as PEFT looks them up
    (3.0 * found @ b.T * weights).sum().backward()
    torch.testing.assert_close(adapter.a.grad, a.grad)
    torch.testing.assert_close(adapter.b.grad, b.grad)
