"""Trains one bf16 step with some patches of the view of torch left out. A script of its own: the
view can't be taken back.

usage: without_patch.py PATCHES FOLDER RANK PROCESSES LAYOUT (ParallelConfig as JSON); the model is
in FOLDER/model
"""

import json
import sys

from rftmega.runtime.device import torch_view

patches, folder, rank, processes, layout = sys.argv[1:]
assert torch_view.install(without=frozenset(patches.split(",")) - {""})

# isort: split
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience
from tests.layouts import build_actor, rows_of

dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=int(processes)
)
optimizer = OptimizerConfig(learning_rate=1e-3, distributed=processes == "1")
actor = build_actor(
    f"{folder}/model", ParallelConfig(**json.loads(layout)), optimizer, dtype="bfloat16"
)
rows = rows_of([[1, 2, 3], [4, 5]])
logp = actor.log_probs(rows).logp
experience = Experience(
    rows.tokens,
    rows.prompt_lengths,
    rows.lengths,
    rows.mask,
    logp,
    logp,
    None,
    torch.ones_like(logp),
)
assert actor.step(experience, policy_loss())["skipped_steps"] == 0

drawn = []
for _ in range(2):
    with get_cuda_rng_tracker().fork():
        drawn.append(torch.rand(4))
assert not torch.equal(*drawn), "forked generators repeat themselves"
sys.stdout.write("trained\n")
