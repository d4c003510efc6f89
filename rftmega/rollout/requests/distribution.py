"""Reference implementation of the next-token distribution that a `Sampling` (temperature, top-k,
top-p, min-p) describes; fast engines are tested against it.
"""

import math

from torch import Tensor

from rftmega.core.types import Sampling


def log_probs_of(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Returns the log-probs [V] of the sampling distribution, renormalised after min-p, top-k and
    top-p, for the logits [V] of one position; -inf for tokens that are never sampled. With
    temperature 0, returns the log-probs of the unscaled logits.
    """
    logp = (logits_V / (sampling.temperature or 1.0)).log_softmax(-1)
    if not sampling.temperature:
        return logp
    if sampling.min_p:
        least = logp.max() + math.log(sampling.min_p)
        logp = logp.where(logp >= least, -math.inf).log_softmax(-1)
    order = logp.argsort(descending=True, stable=True)
    if sampling.top_k:
        logp[order[sampling.top_k :]] = -math.inf
        logp = logp.log_softmax(-1)
    if sampling.top_p < 1:
        likelier = logp[order].exp().cumsum(-1) - logp[order].exp()  # sum of all before each
        logp[order[likelier >= sampling.top_p]] = -math.inf
        logp = logp.log_softmax(-1)
    return logp
