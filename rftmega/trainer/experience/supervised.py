"""Conversion of supervised rows into an Experience, which then has no sampled log-probs or
advantages.
"""

import torch

from rftmega.core.types import Experience, Rows


def given(rows: Rows) -> Experience:
    """Returns an Experience of `rows` with log-probs and advantages of 0, for the losses of
    algorithms/supervised.py and preference.py, which do not read them.
    """
    zeros = torch.zeros(rows.mask.shape)
    return Experience(
        tokens=rows.tokens,
        prompt_lengths=rows.prompt_lengths,
        lengths=rows.lengths,
        mask=rows.mask,
        behaviour_logp=zeros,
        old_logp=zeros,
        reference_logp=None,
        advantage=zeros,
        images=rows.images,
        unsafe=rows.unsafe,
        desirable=rows.desirable,
        reference_sum=rows.reference_sum,
    )
