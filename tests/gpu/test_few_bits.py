"""Moments and products of few bits on one device: on a CUDA device with `make gpu`, and what of it a CPU
can do there.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import rftmega.runtime.device.before_megatron  # noqa: F401

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.model_providers.optional_cuda_packages import uses_transformer_engine
from rftmega.runtime import device
from rftmega.runtime.device.residency import ADAM, PARTS
from rftmega.trainer.experience import given
from tests import optional
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = [[(37 * i + 11 * b) % 131 for i in range(n)] for b, n in enumerate((30, 2, 17, 5, 26))]
STEPS = 4


@pytest.fixture(autouse=True)
def _on_the_device(request: pytest.FixtureRequest) -> None:
    found = device.current().type
    if request.node.callspec.params["where"] != found:
        pytest.skip(f"this process computes on {found}")


def states_body(world: Any, folder: Path, states: Any) -> tuple[list[float], int]:
    """Returns the loss of each step, and the bytes of Adam's moments."""
    optional.find()
    optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, states=states)
    actor = build_actor(folder, ParallelConfig(), optimizer, dtype="bfloat16")
    losses = []
    for _ in range(STEPS):
        losses.append(actor.step(given(rows_of(ROWS)), cross_entropy_loss())["loss"])
        actor.residency.only()
        actor.residency.only(*PARTS)
    return losses, actor.residency.bytes()[ADAM]


@pytest.mark.parametrize("where", ON)
def test_moments_of_few_bits_learn_and_take_less(where: str, tmp_path: Path) -> None:
    optional.find()
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    folder = save_tiny(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    found = {
        states: run_ranks(1, states_body, folder, states, timeout=300)[0]
        for states in ("float32", "bfloat16", "8bit")
    }
    exact, whole = found["float32"]
    assert exact[-1] < exact[0] - 0.1
    for states, share in (("bfloat16", 0.51), ("8bit", 0.35)):  # small ones stay as they are
        losses, held = found[states]
        assert losses == pytest.approx(exact, rel=0.02)
        assert held < share * whole


def products_body(world: Any, folder: Path, fp8: Any) -> torch.Tensor:
    actor = build_actor(folder, ParallelConfig(), dtype="bfloat16", fp8=fp8)
    actor.step(given(rows_of(ROWS)), cross_entropy_loss())
    return actor.log_probs(rows_of(ROWS)).logp


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_8_bits_are_near_those_of_16(where: str, tmp_path: Path) -> None:
    products = device.current().fp8_matmuls()
    if not products or not uses_transformer_engine():
        pytest.skip("no Transformer Engine, or no products of 8 bits")
    folder = save_tiny(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    plain, rounded = (
        run_ranks(1, products_body, folder, fp8, timeout=300)[0] for fp8 in ("none", products[0])
    )
    difference = (plain - rounded).abs()
    assert 1e-4 < difference.max() < 1.0
    assert difference.mean() < 0.1
