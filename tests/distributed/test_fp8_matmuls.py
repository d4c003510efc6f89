"""Layers multiply in 8 bits (model.fp8) on a stand-in of Transformer Engine: where its modules are
told to, on as many tokens as they take, and each token by itself.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.trainer.experience import given
from tests.layouts import build_actor, rows_of
from tests.ranks import TRANSFORMER_ENGINE, run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
ROWS = [
    [(37 * i + 11 * b) % 131 for i in range(n)] for b, n in enumerate((30, 2, 17, 5, 26, 9, 3, 21))
]
STEPS = 2
# a value that float noise takes to the next of 8 bits; tokens that share a scale differ by 100 times it
Found = tuple[list[tuple[float, float]], Tensor]


def body(world: Any, folder: Path, parallel: ParallelConfig, fp8: str, cap: int) -> Found:
    """Returns (loss, gradient norm) of each step, and the log-probs before them."""
    optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4)
    actor = build_actor(folder, parallel, optimizer, fp8=fp8, token_cap=cap)
    logp = actor.log_probs(rows_of(ROWS)).logp
    told = []
    for _ in range(STEPS):
        metrics = actor.step(given(rows_of(ROWS)), cross_entropy_loss())
        told.append((metrics["loss"], metrics["grad_norm"]))
    return told, logp


def found(folder: Path, parallel: ParallelConfig, ranks: int, fp8: str, cap: int = 64) -> Found:
    return run_ranks(ranks, body, folder, parallel, fp8, cap, preloaded=TRANSFORMER_ENGINE)[0]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    folder = save_tiny(tmp_path_factory.mktemp("dense"), "qwen3")
    return folder, found(folder, P(), 1, "blockwise")


def test_products_are_rounded_and_learn_what_others_do(dense: tuple[Path, Found]) -> None:
    folder, (told, logp) = dense
    exact, plain = found(folder, P(), 1, "none")
    assert 1e-3 < (logp - plain).abs().max() < 0.5
    for ours, theirs in zip(told, exact, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    assert told[-1][0] < told[0][0] - 0.05


@pytest.mark.parametrize(
    ("ranks", "parallel", "cap"),
    [(1, P(), 32), (2, P(), 64), (2, P(pipeline=2), 32), (2, P(context=2), 64)],
    ids=["smaller micro-batches", "DP2", "PP2", "CP2"],
)
def test_a_token_has_the_same_numbers_whatever_is_beside_it(
    ranks: int, parallel: ParallelConfig, cap: int, dense: tuple[Path, Found]
) -> None:
    folder, (wanted, logp) = dense
    told, ours = found(folder, parallel, ranks, "blockwise", cap)
    for mine, theirs in zip(told, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    torch.testing.assert_close(ours, logp, atol=1e-4, rtol=0)


def test_shards_of_matrices_are_rounded_by_themselves(dense: tuple[Path, Found]) -> None:
    folder, (wanted, _) = dense
    told, _ = found(folder, P(tensor=2, sequence=True), 2, "blockwise")
    for mine, theirs in zip(told, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=0.05)


@pytest.mark.ranks
def test_experts_of_8_bits_are_spread_without_another_result(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe")
    wanted, logp = found(folder, P(), 1, "blockwise")
    told, ours = found(folder, P(expert=2), 2, "blockwise")
    for mine, theirs in zip(told, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    torch.testing.assert_close(ours, logp, atol=1e-4, rtol=0)
