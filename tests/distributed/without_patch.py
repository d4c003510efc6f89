"""Trains one bf16 step with some patches of the view of torch left out. A script of its own: the view can't be taken back.

usage: without_patch.py PATCHES MODEL_FOLDER MEETING_FILE RANK STAGES
"""

import sys

from rftmega.device import torch_view

patches, folder, meeting, rank, stages = sys.argv[1:]
assert torch_view.install(without=frozenset(patches.split(",")) - {""})

# isort: split
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.megatron import MegatronActor
from rftmega.types import Experience
from tests.layouts import build_manager, rows_of

dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(stages))
manager = build_manager(folder, ParallelConfig(pipeline=int(stages)), dtype=torch.bfloat16)
manager.setup_model_and_optimizer(OptimizerConfig(learning_rate=1e-3, distributed=stages == "1"), optimizer_steps=9)
actor = MegatronActor(manager, temperature=1.0, token_cap=64)
rows = rows_of([[1, 2, 3], [4, 5]])
logp = actor.log_probs(rows).logp
experience = Experience(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, logp, logp, None, torch.ones_like(logp))
assert actor.update(experience, policy_loss())["skipped_steps"] == 0

drawn = []
for _ in range(2):
    with get_cuda_rng_tracker().fork():
        drawn.append(torch.rand(4))
assert not torch.equal(*drawn), "forked generators repeat themselves"
sys.stdout.write("trained\n")
