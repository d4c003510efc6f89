"""RMSNorm in plain torch with support for sequence parallelism, which Megatron's own torch norm
lacks.
"""

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

# of latent attention's low-rank vectors in transformers, whatever rms_norm_eps is
LATENT_EPSILON = 1e-6


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm applies root mean square normalisation (arXiv:1910.07467) over the last dimension.

    It multiplies by its weight, or by 1 + its weight if the config has
    `layernorm_zero_centered_gamma`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        # finalize_model_grads sums the gradients of parameters with this mark over the TP ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.zero_centered:
            return super().forward(x)
        weight = 1.0 + self.weight.float()  # in float32, as transformers' Gemma
        return functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


class LatentNorm(RMSNorm):
    """LatentNorm normalises the low-rank vectors of latent attention, with transformers' fixed
    epsilon.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: object):
        super().__init__(config, hidden_size, eps=LATENT_EPSILON)
