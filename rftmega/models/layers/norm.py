"""RMSNorm in torch that tolerates sequence parallelism, which Megatron's own torch norm refuses."""

import torch
from megatron.core.transformer import TransformerConfig

# of latent attention's narrow vectors in transformers, whatever rms_norm_eps is
LATENT_EPSILON = 1e-6


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square normalisation (arXiv:1910.07467) over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # finalize_model_grads adds up, over the TP ranks, the gradients of parameters that carry
        # this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentNorm(RMSNorm):
    """LatentNorm normalises latent attention's narrow vectors."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: object):
        super().__init__(config, hidden_size, eps=LATENT_EPSILON)
