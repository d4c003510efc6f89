"""A process whose weights are other than those of its data-parallel peers is found and named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.errors import NodeFault
from rftmega.monitoring.observers.replica_check import ReplicaCheck, check_replicas, sums_of
from tests.distributed.test_checkpoints import learn
from tests.layouts import build_actor, build_policy
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
SHARDED = OptimizerConfig(learning_rate=1e-2, distributed=True)
OVERLAPPED = OptimizerConfig(
    learning_rate=1e-2, distributed=True, overlap_grad_reduce=True, overlap_param_gather=True
)


class Step:
    """A trainer at a step."""

    def __init__(self, step: int):
        self.step = step


def flipped(tensor: torch.Tensor) -> None:
    """Flips one bit of the tensor, as faulty memory does."""
    tensor.view(-1).view(torch.int32)[7] ^= 1 << 3


def body(
    world: Any, folder: Path, parallel: ParallelConfig, optimizer: Any, faulty: int, name: str
) -> str:
    actor = build_actor(folder, parallel, optimizer=optimizer)
    learn(actor, 2)
    check_replicas({"policy": actor}, step=2)
    if world.rank == faulty:
        found = [item for item in actor.manager.bound if name in item.hf_names]
        flipped(found[0].parameter.data)
    check = ReplicaCheck({"policy": actor}, every=2)
    check.on_step(Step(3), {})  # type: ignore[arg-type]
    try:
        check.on_step(Step(4), {})  # type: ignore[arg-type]
    except NodeFault as error:
        return str(error)
    return ""


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("processes", "parallel", "optimizer", "faulty"),
    [
        pytest.param(3, P(), OVERLAPPED, 1, id="DP3, overlapped"),
        pytest.param(
            6, P(tensor=2), SHARDED, 3, marks=pytest.mark.ranks, id="TP2 x DP3, sharded optimizer"
        ),
        pytest.param(
            6, P(pipeline=2), SHARDED, 5, marks=pytest.mark.ranks, id="PP2 x DP3, sharded optimizer"
        ),
    ],
)
def test_one_flipped_bit_is_found_with_its_process_and_its_tensor(
    processes: int, parallel: ParallelConfig, optimizer: Any, faulty: int, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    name = NAME.replace(".1.", ".3.") if parallel.pipeline > 1 else NAME
    found = run_ranks(processes, body, folder, parallel, optimizer, faulty, name)
    assert len(set(found)) == 1
    said = found[0]
    assert said.startswith(f"step 4: rank {faulty} on ") and f"(1 tensor(s): {name})" in said
    assert "differ from those of the other 2 process(es)" in said
    assert said.count("rank ") == 1


def test_of_two_copies_it_can_not_be_told_which_is_wrong(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    found = run_ranks(2, body, folder, P(), SHARDED, 1, NAME)
    assert "rank 0 on " in found[0] and "rank 1 on " in found[0]
    assert "can't be told" in found[0]


def sharded_body(world: Any, folder: Path, replicas: int) -> str:
    actor = build_policy(folder, P(replicas=replicas), backend="fsdp")
    assert sums_of({"policy": actor})
    if world.rank == 2:
        flipped(actor.manager.trained[0].pushed)
    try:
        check_replicas({"policy": actor}, step=1)
    except NodeFault as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(("replicas", "said"), [(2, "can't be told"), (1, "")])
def test_replicas_of_fsdp2_are_compared_and_shards_have_none(
    replicas: int, said: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    (found, *_) = run_ranks(4, sharded_body, folder, replicas)
    assert (said in found) if said else not found
