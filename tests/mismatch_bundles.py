"""A bundle as the gate saves it, of a model's own log-probabilities by transformers, with one side
off.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rftmega.algorithms.mismatch import log_prob_gap
from rftmega.core.types import Rows
from rftmega.trainer.logprob_mismatch.bundle import GapBundle
from rftmega.trainer.logprob_mismatch.causes import Evidence, Limits

TEMPERATURE = 0.7


@torch.no_grad()
def bundle_of_the_start(model: Path, folder: Path, *, wrong: str) -> Path:
    """Two rows of step 0.

    `wrong`: the engine or the trainer, whose every other token is off by 1.
    """
    rows = Rows.of_completions(
        torch.tensor([[5, 9, 100, 4, 4, 7, 8, 3], [3, 8, 8, 9, 1, 6, 2, 5]]),
        torch.tensor([3, 1]),
        torch.tensor([8, 8]),
    )
    built = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = built(rows.tokens[:, :-1]).logits / TEMPERATURE
    right = logits.log_softmax(-1).gather(-1, rows.tokens[:, 1:, None])[..., 0]
    off = right.clone()
    off[:, ::2] += 1.0
    off[:, 1::4] -= 1.0
    engine, trainer = (off, right) if wrong == "engine" else (right, off)
    evidence = Evidence(
        whole=log_prob_gap(engine, trainer, rows.mask),
        share_beyond=0.5,
        mask=rows.mask,
        behaviour_logp=engine,
        old_logp=trainer,
        untempered_logp=None,
        other_prompt=torch.tensor([-1, -1]),
        after_push=None,
        checksums=[],
        has_experts=False,
    )
    versions = torch.where(rows.mask, 0, -1)
    config = {"model": {"path": str(model)}}
    GapBundle(0, TEMPERATURE, "float32", Limits(1e-3, 1e-4), rows, versions, evidence, config).save(
        folder
    )
    return folder
