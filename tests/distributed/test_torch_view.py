"""Each patch of the view of torch is needed: without it, unmodified megatron-core fails on a CPU."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]

# One process is both stages of nothing; two are needed for what only happens between stages.
TRAIN = """
import sys
from rftmega.device import torch_view
assert torch_view.install(without=frozenset(sys.argv[1].split(",")) - {""})
from pathlib import Path
import torch
import torch.distributed as dist
from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.types import Experience
from tests.layouts import build_actor, rows_of
dist.init_process_group("gloo")
stages = dist.get_world_size()
from tests import layouts
real = layouts.build_manager
layouts.build_manager = lambda folder, parallel: real(folder, parallel, dtype=torch.bfloat16)
optimizer = OptimizerConfig(learning_rate=1e-3, distributed=stages == 1)
actor = build_actor(Path(sys.argv[2]), ParallelConfig(pipeline=stages), optimizer)
rows = rows_of([[1, 2, 3], [4, 5]])
logp = actor.log_probs(rows).logp
plain = Experience(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, logp, logp, None, torch.ones_like(logp))
assert actor.update(plain, policy_loss())["skipped_steps"] == 0
from megatron.core.tensor_parallel import get_cuda_rng_tracker
tracker = get_cuda_rng_tracker()
with tracker.fork():
    one = torch.rand(4)
with tracker.fork():
    two = torch.rand(4)
outside = torch.rand(4)
assert not torch.equal(one, two), "forked generators repeat themselves"
print("trained")
"""


def train(folder: Path, *, without: str, stages: int) -> tuple[bool, str]:
    """Did it train on `stages` processes? And what they said."""
    processes = []
    for rank in range(stages):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(stages), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-c", textwrap.dedent(TRAIN), without, str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=120)[0] for process in processes]
    return all("trained" in text for text in said), "\n".join(said)


EXPECTED = {
    "current_device": (1, "not compiled with CUDA"),
    "literals": (1, "not compiled with CUDA"),
    "streams": (2, "not compiled with CUDA"),
    "rng": (1, "CUDA"),
    "tensor_type": (1, "TypeError"),
    "tensor_cuda": (2, "CUDA"),
}
