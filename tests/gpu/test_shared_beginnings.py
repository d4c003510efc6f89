"""Rows that begin alike against rows that are computed one by one, on one device: on a CUDA device,
where FlashAttention computes them, with `make gpu`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import rftmega.runtime.device.before_megatron  # noqa: F401

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.runtime import device
from rftmega.trainer.experience import given
from tests.invariance import begun_alike
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = [[(37 * i + 11 * b) % 131 for i in range(n)] for b, n in enumerate((300, 40, 170, 5, 260))]
PROMPTS = [250, 35, 160, 2, 200]
WINDOW: dict[str, Any] = {
    "use_sliding_window": True, "sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_device(request: pytest.FixtureRequest) -> None:
    found = device.current().type
    if request.node.callspec.params["where"] != found:
        pytest.skip(f"this process computes on {found}")


def body(world: Any, folder: Path, backend: str, dtype: str, shares: bool) -> Any:
    """Returns log-probs before and after two updates, and the gradient's norms."""
    rows = begun_alike(rows_of(ROWS, PROMPTS))
    policy = build_policy(
        folder, ParallelConfig(), OptimizerConfig(learning_rate=1e-3, epsilon=1e-4),
        backend=backend, dtype=dtype, token_cap=4000, share_prefixes=shares,
    )  # fmt: skip
    assert policy.runner.shares == shares
    before = policy.log_probs(rows).logp.cpu()
    norms = [policy.step(given(rows), cross_entropy_loss())["grad_norm"] for _ in range(2)]
    return before, policy.log_probs(rows).logp.cpu(), norms


@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("windowed", [False, True])
def test_rows_that_begin_alike_learn_as_if_each_was_computed_alone(
    where: str, backend: str, windowed: bool, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3", **(WINDOW if windowed else {}))
    dtype, near = ("bfloat16", 5e-2) if where == "cuda" else ("float32", 1e-4)
    (alone,), (shared,) = (run_ranks(1, body, folder, backend, dtype, own) for own in (False, True))
    for one, other in zip(shared[:2], alone[:2], strict=True):
        assert float((one - other).abs().mean()) < near
    assert shared[2] == pytest.approx(alone[2], rel=near)
    assert torch.isfinite(shared[1]).all()
