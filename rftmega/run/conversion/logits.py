"""Compares the logits of a converted model with those of transformers."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rftmega.backends.megatron.manager import MegatronModelManager
from rftmega.config import ModelConfig, ParallelConfig, RunConfig
from rftmega.runtime.parallel.topology import Topology


def logit_difference(folder: Path, converted: Path) -> float:
    """Returns the largest absolute difference of fp32 logits over one sequence of 64 tokens, between
    `folder` in transformers and `converted` in Megatron.
    """
    config = RunConfig(model=ModelConfig(path=str(converted), dtype="float32"))
    manager = MegatronModelManager(config, Topology.create(ParallelConfig(), seed=0))
    words = manager.description.vocabulary
    tokens = (torch.arange(64) * 37 % words)[None]
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    with torch.no_grad():
        ours = manager.custom_forward(
            manager.chunks[0].eval(), tokens, torch.ones_like(tokens, dtype=torch.bool), None, False
        )
        return float((ours[..., :words] - theirs(tokens).logits).abs().max())
