"""Parts of the trainer leave the device and come back, bit for bit, whatever the optimizer is made
of.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.backends.optimizers.offload import inner_optimizers
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience
from rftmega.runtime.device.residency import ADAM, GRADIENTS, MAIN_PARAMETERS, PARAMETERS, PARTS
from rftmega.weights import Exporter
from tests.invariance import saved
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.vision_rows import rows_with_images

P = ParallelConfig
INTERLEAVED = P(pipeline=2, virtual_pipeline=2)
PLAIN = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, distributed=False)
SHARDED = replace(PLAIN, distributed=True)
# (processes, model, layout, optimizer, dtype, the kinds inside Megatron's chain)
KINDS = {
    "fp32": (1, "qwen3", P(), PLAIN, "float32", ["FP32Optimizer"]),
    "bf16": (1, "qwen2-tied", P(), PLAIN, "bfloat16", ["Float16OptimizerWithFloat16Params"]),
    "distributed, fp32": (2, "qwen3", P(), SHARDED, "float32", ["DistributedOptimizer"]),
    "distributed, bf16, interleaved": (4, "qwen3", INTERLEAVED, SHARDED, "bfloat16", ["DistributedOptimizer"]),
    "experts, fp32": (2, "qwen3-moe", P(expert=2), PLAIN, "float32", ["FP32Optimizer"] * 2),
    "a tower, distributed, bf16": (2, "qwen3_vl", P(), SHARDED, "bfloat16", ["DistributedOptimizer"]),
    "experts, distributed, bf16": (4, "qwen3-moe", P(expert=2), SHARDED, "bfloat16", ["DistributedOptimizer"] * 2),
}  # fmt: skip
FEW = ["fp32", "bf16", "experts, distributed, bf16"]
MARKED = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.ranks) for kind in KINDS]


def prepared(folder: Path, parallel: ParallelConfig, optimizer: OptimizerConfig, dtype: str) -> Any:
    actor = build_actor(folder, parallel, optimizer, dtype=dtype, token_cap=120)
    return actor, prepared_by(actor, folder)


def prepared_by(actor: Any, folder: Path) -> Experience:
    """Rows, scored by an actor, to learn from."""
    rows = rows_of([[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11], [3, 1, 2]])
    if actor.description.tower:
        rows = rows_with_images(folder)
        logp = actor.log_probs(rows.ragged()).logp.padded()
    else:
        logp = actor.log_probs(rows).logp
    return Experience(
        rows.tokens,
        rows.prompt_lengths,
        rows.lengths,
        rows.mask,
        logp,
        logp,
        None,
        torch.ones_like(logp),
        images=rows.images,
    )


def bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


def contents(residency: Any) -> dict[str, list[torch.Tensor]]:
    """A copy of every part."""
    parts = residency.storages()
    return {
        part: [bytes_of(storage) for storage in storages.values()]
        for part, storages in parts.items()
    }


def offload_body(world: Any, *case: Any) -> Any:
    actor, experience = prepared(*case)
    actor.step(experience, policy_loss())
    residency = actor.manager.residency
    full, before = residency.bytes(), contents(residency)
    steps = []
    for part in PARTS:  # each on its own
        residency.off(part)
        assert residency.bytes() == full | {part: 0}, part
        residency.off(part)  # twice is once
        residency.on(part)
        residency.on(part)
        assert residency.bytes() == full
    for _ in range(2):  # off, on, off, on
        residency.off(*PARTS)
        steps.append(residency.bytes())
        residency.on(*PARTS)
    after = contents(residency)
    for part in PARTS:
        assert all(torch.equal(a, b) for a, b in zip(before[part], after[part], strict=True)), part
    kinds = [type(inner).__name__ for inner in inner_optimizers(actor.manager.optimizer)]
    return kinds, full, steps


@pytest.mark.parametrize("kind", MARKED)
def test_every_part_goes_and_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    processes, variant, parallel, optimizer, dtype, wanted = KINDS[kind]
    for kinds, full, gone in run_ranks(
        processes, offload_body, saved(tmp_path, variant), parallel, optimizer, dtype
    ):
        assert kinds == wanted
        assert gone == [dict.fromkeys(PARTS, 0)] * 2
        weights = full[PARAMETERS]
        shards = processes // parallel.pipeline if optimizer.distributed else 1
        assert full[GRADIENTS] >= weights * (1 if dtype == "float32" else 2)  # fp32, and padding
        # Two moments in fp32 of every weight; sharded, about that much a rank.
        moments = 2 * weights * (1 if dtype == "float32" else 2)
        assert 0.5 * moments / shards < full[ADAM] < 2.1 * moments / shards
        assert (full[MAIN_PARAMETERS] == 0) == (dtype == "float32")


def phases_body(world: Any, *case: Any) -> Any:
    """Two updates with everything moved between all phases, as a colocated run does, against two
    without.
    """
    found = []
    for offload in (False, True):
        actor, experience = prepared(*case)
        residency, seen = actor.manager.residency, []

        def hold(
            *parts: str, move: bool = offload, residency: Any = residency, seen: list[Any] = seen
        ) -> None:
            if move:
                residency.only(*parts)
                seen.append(residency.bytes())

        metrics = []
        for _ in range(2):
            hold()
            hold(PARAMETERS)
            score = actor.log_probs(experience.rows)
            hold(*PARTS)
            metrics.append(actor.step(experience, policy_loss()))
            hold(PARAMETERS)
            weights = {
                n: t.clone()
                for n, t in Exporter(
                    actor.manager.shards(), actor.topology.replica_group, bucket_bytes=20_000
                )
            }
        found.append((metrics, score, weights))
    plain, moved = found
    assert plain[0] == moved[0]
    assert torch.equal(plain[1].logp, moved[1].logp)
    assert all(torch.equal(plain[2][name], moved[2][name]) for name in plain[2])
    return seen


@pytest.mark.parametrize("kind", MARKED)
def test_training_does_not_notice_and_scoring_never_loads_optimizer_state(
    kind: str, tmp_path: Path
) -> None:
    processes, variant, parallel, optimizer, dtype, _ = KINDS[kind]
    for seen in run_ranks(
        processes, phases_body, saved(tmp_path, variant), parallel, optimizer, dtype
    ):
        rollout, score, update, push = seen[4:]
        assert set(rollout.values()) == {0}
        for phase in (score, push):
            assert phase[PARAMETERS] > 0
            assert phase == rollout | {PARAMETERS: phase[PARAMETERS]}
        assert all(update[part] > 0 for part in (PARAMETERS, GRADIENTS, ADAM))


def copy_params_body(world: Any, *case: Any) -> Any:
    actor, experience = prepared(*case)
    actor.step(experience, policy_loss())
    manager = actor.manager
    before = contents(manager.residency)[MAIN_PARAMETERS]
    found = []
    for optimizers in (
        manager.optimizer,
        manager.optimizer.chained_optimizers[0],
        [manager.optimizer],
    ):
        manager.offload_megatron_copy_params(optimizers)
        found.append(manager.residency.bytes())
        manager.load_megatron_copy_params(optimizers)
    after = contents(manager.residency)[MAIN_PARAMETERS]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return found, manager.residency.bytes()


def test_copy_params_move_for_a_chain_one_optimizer_or_a_list(tmp_path: Path) -> None:
    processes, variant, parallel, optimizer, dtype, _ = KINDS["experts, distributed, bf16"]
    case = (save_tiny(tmp_path, variant), parallel, optimizer, dtype)
    for (chain, dense_only, listed), full in run_ranks(processes, copy_params_body, *case):
        assert chain == listed == full | {MAIN_PARAMETERS: 0}
        # the experts' are still here
        assert 0 < dense_only[MAIN_PARAMETERS] < full[MAIN_PARAMETERS]


def host_buffers_body(world: Any, *case: Any) -> Any:
    actor, experience = prepared(*case)
    actor.step(experience, policy_loss())
    residency = actor.manager.residency
    found = []
    for _ in range(3):
        residency.off(*PARTS)
        found.append({number: berth.home.data_ptr() for number, berth in residency._berths.items()})
        residency.on(*PARTS)
    return found


def test_host_buffers_are_used_again(tmp_path: Path) -> None:
    first, second, third = run_ranks(
        1, host_buffers_body, save_tiny(tmp_path, "qwen3"), P(), PLAIN, "bfloat16"
    )[0]
    assert first
    assert first == second == third


def changed_body(world: Any, *case: Any) -> Any:
    """Weights written from outside, then a step: from them, or from the main parameters' memory of
    the old ones?
    """
    actor, experience = prepared(*case)
    with torch.no_grad():
        for item in actor.manager.bound:
            item.parameter.zero_().add_(0.25)
    actor.manager.weights_changed()
    actor.step(experience, policy_loss())
    return max(float((item.parameter.float() - 0.25).abs().max()) for item in actor.manager.bound)


@pytest.mark.parametrize("kind", ["bf16", "distributed, bf16, interleaved"])
def test_weights_written_from_outside_are_where_the_next_step_starts(
    kind: str, tmp_path: Path
) -> None:
    processes, variant, parallel, optimizer, dtype, _ = KINDS[kind]
    for moved in run_ranks(
        processes, changed_body, save_tiny(tmp_path, variant), parallel, optimizer, dtype
    ):
        # a step or two of the learning rate, and not the distance to the old weights
        assert moved < 0.05
