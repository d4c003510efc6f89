"""RMSNorm in plain torch with support for sequence parallelism, which Megatron's own torch norm
lacks.
"""

import torch
from megatron.core.transformer import TransformerConfig

# of latent attention's low-rank vectors in transformers, whatever rms_norm_eps is
LATENT_EPSILON = 1e-6


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm applies root mean square normalisation (arXiv:1910.07467) over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # finalize_model_grads sums the gradients of parameters with this mark over the TP ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentNorm(RMSNorm):
    """LatentNorm normalises the low-rank vectors of latent attention, with transformers' fixed
    epsilon.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: object):
        super().__init__(config, hidden_size, eps=LATENT_EPSILON)
