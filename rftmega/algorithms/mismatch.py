"""How far the engine that sampled is from the trainer that learns."""

from torch import Tensor

from rftmega.types import Metrics


def log_prob_gap(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Metrics:
    """|engine - trainer| log-probability over response tokens (all [B, T]), largest and mean. 0 where there are none."""
    gap = (behaviour_logp - old_logp).abs()[mask]
    if not len(gap):
        return {"logprob_gap_max": 0.0, "logprob_gap_mean": 0.0}
    return {"logprob_gap_max": gap.max().item(), "logprob_gap_mean": gap.mean().item()}
