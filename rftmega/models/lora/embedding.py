"""An embedding with a LoRA adapter."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from rftmega.config import LoRA


class EmbeddingWithPair(nn.Embedding):
    """EmbeddingWithPair is an embedding with a LoRA adapter: it returns W[x] + scaling * B A[:, x],
    without dropout, as in PEFT.
    """

    def __init__(self, plain: nn.Embedding, options: LoRA):
        """Uses the weight of the embedding `plain`; the LoRA matrices are created on the meta
        device, with PEFT's names.
        """
        words, hidden = plain.num_embeddings, plain.embedding_dim
        super().__init__(words, hidden, padding_idx=plain.padding_idx, device="meta")
        self.weight = plain.weight
        with torch.device("meta"):
            self.lora_embedding_A = nn.Parameter(torch.empty(options.rank, words))
            self.lora_embedding_B = nn.Parameter(torch.empty(hidden, options.rank))
        self.scaling, self.off = options.scaling, False

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Returns the LoRA matrices A [rank, vocabulary] and B [hidden, rank]."""
        return self.lora_embedding_A, self.lora_embedding_B

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the vectors [..., hidden] of token ids, which must be indices into this process's
        rows of the vocabulary.
        """
        completion = super().forward(ids)
        if self.off:
            return completion
        # torch's embedding sums its gradient in any order on a GPU
        found = self.lora_embedding_A.T[ids]
        if self.padding_idx is not None:  # its row learns nothing, as in PEFT
            found = torch.where((ids == self.padding_idx)[..., None], found.detach(), found)
        return completion + self.scaling * functional.linear(found, self.lora_embedding_B)
