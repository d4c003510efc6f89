"""A policy's numbers and moves on one device: on a CUDA device with `make gpu`, and the same bodies
on a CPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rftmega.runtime.device.before_megatron  # noqa: F401

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience
from rftmega.runtime import device
from rftmega.runtime.device.residency import ADAM, GRADIENTS, MAIN_PARAMETERS, PARAMETERS, PARTS
from rftmega.trainer.logprob_mismatch.gate import LIMITS
from rftmega.weights import Exporter
from tests.layouts import build_actor, build_policy, rows_of
from tests.plain_loop import log_probs, trained
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = [
    [5, 9, 130, 2, 77],
    [3, 0],
    [(37 * i) % 131 for i in range(30)],
    [1, 2, 3, 4, 5, 6],
    [8, 8, 1],
    [9, 8, 7],
]
PROMPTS = [2, 1, 4, 3, 1, 2]
OPTIMIZER = OptimizerConfig(
    epsilon=1e-4, learning_rate=1e-2, weight_decay=0.1, clip_grad=0.0, warmup_steps=0
)
FAMILIES = ("qwen3", "qwen3-moe", "deepseek-v3")
CASES = [*[(family, "megatron") for family in FAMILIES], ("qwen3", "fsdp"), ("qwen3-moe", "fsdp")]
MOE, FULLY_SHARDED = ("qwen3-moe", "megatron"), ("qwen3", "fsdp")  # they reach the most code
EXACT, ROUNDED = 1e-4, LIMITS["bfloat16"]  # nats


def cases(*quick: tuple[str, str]) -> pytest.MarkDecorator:
    """Every case on both kinds of devices; on a CPU all but the `quick` ones belong to `ranks`."""

    def given(case: tuple[str, str], where: str) -> Any:
        slow = [] if case in quick else [pytest.mark.ranks]
        return pytest.param(*case, where, marks=[pytest.mark.gpu] if where == "cuda" else slow)

    every = [given(case, where) for where in ("cpu", "cuda") for case in CASES]
    return pytest.mark.parametrize(("variant", "backend", "where"), every)


@pytest.fixture(autouse=True)
def _on_the_device(request: pytest.FixtureRequest) -> None:
    found = device.current().type
    wanted = request.node.callspec.params["where"]
    if wanted != found:
        pytest.skip(f"this process computes on {found}")


def score_body(world: Any, folder: Path, dtype: str, backend: str) -> Any:
    policy = build_policy(folder, ParallelConfig(), dtype=dtype, backend=backend)
    assert {shard.tensor.device.type for shard in policy.shards()} == {device.current().type}
    return policy.log_probs(rows_of(ROWS)).logp


def gap(found: Tensor, model: Any) -> Tensor:
    """[N] between log-probs, of all tokens but the first of each row."""
    with torch.no_grad():
        wanted = log_probs(model, ROWS)
    return torch.cat([(found[b, : len(logp)] - logp).abs() for b, logp in enumerate(wanted)])


@cases(MOE, FULLY_SHARDED)
def test_log_probs_are_those_of_transformers(
    variant: str, backend: str, where: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    model = trained(folder, ROWS, PROMPTS, updates=0)
    (found,) = run_ranks(1, score_body, folder, "float32", backend)
    assert gap(found, model).max() < EXACT
    (found,) = run_ranks(1, score_body, folder, "bfloat16", backend)
    difference = gap(found, model)  # what a run may differ from its engine by
    assert difference.mean() < ROUNDED.mean and difference.max() < ROUNDED.percentile, (
        difference.mean(),
        difference.max(),
    )


def update_body(world: Any, folder: Path, dtype: str, backend: str, learning_rate: float) -> Any:
    optimizer = replace(OPTIMIZER, learning_rate=learning_rate)
    policy = build_policy(folder, ParallelConfig(), optimizer, dtype=dtype, backend=backend)
    rows = rows_of(ROWS, PROMPTS)
    logp = policy.log_probs(rows).logp
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
    for _ in range(2):
        policy.step(experience, policy_loss())
    policy.residency.finish()
    exporter = Exporter(policy.shards(), policy.replica_group, bucket_bytes=2**20)
    weights = {name: tensor.cpu() for name, tensor in exporter}
    return weights, policy.log_probs(rows).logp


@cases(MOE, FULLY_SHARDED)
def test_two_updates_are_those_of_a_plain_loop_of_transformers_and_torch(
    variant: str, backend: str, where: str, tmp_path: Path
) -> None:
    """Weights by their names; experts, which transformers keeps in one tensor, by the log-probs
    afterwards.
    """
    folder = save_tiny(tmp_path, variant)
    model = trained(folder, ROWS, PROMPTS, updates=2)
    ((weights, logp),) = run_ranks(1, update_body, folder, "float32", backend, 1e-2)
    theirs = dict(model.named_parameters())
    compared = weights.keys() & theirs.keys()
    assert len(compared) > 10
    for name in compared:
        torch.testing.assert_close(
            weights[name],
            theirs[name].detach(),
            atol=5e-5,
            rtol=2e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    assert gap(logp, model).max() < EXACT


@cases(("qwen3", "megatron"))
def test_two_updates_in_bfloat16_go_where_those_in_float32_go(
    variant: str, backend: str, where: str, tmp_path: Path
) -> None:
    """At a tenth of the rate, since Adam turns what is rounding in a gradient into whole steps."""
    folder = save_tiny(tmp_path, variant)
    ((_, logp),) = run_ranks(1, update_body, folder, "bfloat16", backend, 1e-3)
    before, after = (
        trained(folder, ROWS, PROMPTS, updates=updates, learning_rate=1e-3) for updates in (0, 2)
    )
    assert gap(logp, after).mean() < 0.2 * gap(logp, before).mean()


def contents(residency: Any, part: str) -> list[torch.Tensor]:
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone()
        for storage in residency.storages()[part].values()
    ]


def cycles_body(world: Any, folder: Path) -> Any:
    actor = build_actor(
        folder,
        ParallelConfig(),
        replace(OPTIMIZER, distributed=True),
        dtype="bfloat16",
        keep_reference=True,
    )
    rows = rows_of(ROWS, PROMPTS)
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
    actor.step(experience, policy_loss())
    residency = actor.manager.residency
    before = {part: contents(residency, part) for part in (PARAMETERS, MAIN_PARAMETERS, ADAM)}
    scored = actor.log_probs(rows).logp
    for _ in range(3):
        residency.only()
        assert residency.bytes() == dict.fromkeys(PARTS, 0)
        residency.only(PARAMETERS)
        assert torch.equal(actor.reference_log_probs(rows).logp, logp)
        assert torch.equal(actor.log_probs(rows).logp, scored)
        residency.on(*PARTS)
        for part, wanted in before.items():
            assert all(
                torch.equal(a, b) for a, b in zip(contents(residency, part), wanted, strict=True)
            ), part
        assert not any(x.any() for x in contents(residency, GRADIENTS))
        residency.changed()
    return True


@pytest.mark.parametrize("where", ON)
def test_three_cycles_to_the_host_and_back_leave_every_bit_and_the_reference_beside(
    where: str, tmp_path: Path
) -> None:
    assert run_ranks(1, cycles_body, save_tiny(tmp_path, "qwen3")) == [True]
