"""What leaves the trainer is the present policy: every push and every export, at once after an
update, under every schedule.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig, RolloutConfig
from rftmega.core.types import Experience
from rftmega.rollout.engines import ScriptedEngine
from rftmega.run.placement import engines
from rftmega.weights import Exporter
from tests.layouts import config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
PLAIN = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4)
OVERLAPPED = replace(PLAIN, distributed=True, overlap_grad_reduce=True, overlap_param_gather=True)


class Keeps(ScriptedEngine):
    """Keeps a copy of what it is given."""

    loaded: dict[str, Tensor] = {}

    def _load_weights(self, named_tensors: Any) -> None:
        self.loaded = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            for name, tensor in named_tensors
        }


def experience_of(rows: Any) -> Experience:
    torch.manual_seed(3)
    logp = torch.full(rows.mask.shape, -3.0)
    return Experience(
        tokens=rows.tokens, prompt_lengths=rows.prompt_lengths, lengths=rows.lengths, mask=rows.mask, behaviour_logp=logp,
        old_logp=logp, reference_logp=None, advantage=torch.randn(len(rows), 1) * rows.mask,
    )  # fmt: skip


def follows_body(
    world: Any,
    folder: Path,
    output: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    offload: bool,
) -> None:
    from rftmega.backends.megatron import MegatronBackend
    from rftmega.run.placement.reinforcement import ReinforcementStrategy

    config = config_of(folder, parallel, optimizer)
    config.rollout = RolloutConfig(engine="scripted", max_prompt_tokens=8, max_response_tokens=6)
    config.trainer.offload = offload
    engines.create = lambda config, world, *, experts, **named: Keeps(config.rollout, **named)  # type: ignore[assignment]
    strategy = ReinforcementStrategy(config, world, MegatronBackend(), stop_ids=[1])
    manager, engine = strategy.actor.manager, strategy.local_engine
    assert isinstance(engine, Keeps)
    experience = experience_of(
        rows_of([[5, 9, 100, 4, 4], [3, 8, 8], [1, 2, 3, 4], [9, 9, 7]], [2, 1, 1, 1])
    )

    def present() -> dict[str, Tensor]:
        """The policy, after its parameters were gathered whatever has been before."""
        for chunk in manager.model if optimizer.overlap_param_gather else []:
            chunk.start_param_sync(force_sync=True)
        strategy.phases.push()
        exporter = Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=2**20)
        return {name: tensor.clone() for name, tensor in exporter}

    disk = load_file(folder / "model.safetensors")
    before = disk
    strategy.weights.push(version=0)
    assert_same(engine.loaded, disk)
    for version in (1, 2):
        strategy.policy.step(experience, policy_loss())
        strategy.weights.push(version=version)
        now = present()
        assert now.keys() == disk.keys()
        assert all(
            not torch.equal(tensor, before[name])
            for name, tensor in now.items()
            if tensor.dim() > 1
        )
        assert_same(engine.loaded, now)
        before = now
    strategy.policy.step(experience, policy_loss())
    strategy.export(output)
    now = present()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in now.items())
    assert_same(load_file(output / "model-00001-of-00001.safetensors"), now)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize(
    ("processes", "parallel", "optimizer", "offload"),
    [
        pytest.param(2, P(), OVERLAPPED, True, marks=pytest.mark.ranks, id="DP2, overlapped"),
        pytest.param(2, P(), OVERLAPPED, False, id="DP2, overlapped, nothing offloaded"),
        pytest.param(
            2,
            P(pipeline=2, virtual_pipeline=2),
            PLAIN,
            True,
            marks=pytest.mark.ranks,
            id="PP2 x VPP2",
        ),
        pytest.param(
            4,
            P(pipeline=2, virtual_pipeline=2),
            OVERLAPPED,
            True,
            id="PP2 x VPP2 x DP2, overlapped",
        ),
    ],
)
def test_every_push_and_export_is_of_the_present_policy(
    processes: int,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    offload: bool,
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    run_ranks(processes, follows_body, folder, tmp_path / "policy", parallel, optimizer, offload)
