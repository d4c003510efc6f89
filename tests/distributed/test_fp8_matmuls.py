"""Layers multiply in 8 bits (model.fp8) on a stand-in of Transformer Engine: where its modules are
told to, on as many tokens as they take, and each token by itself.
"""

from pathlib import Path
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    parallel: ParallelConfig
    ranks: int = 1
    fp8: str = "blockwise"
    cap: int = 64


def body(world: Any, folder: Path, cases: list[Case]) -> list[Found]:
    """Of each case (loss, gradient norm) of each step, and the log-probs before them."""
    optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4)
    result = []
    for case in cases:
        actor = build_actor(folder, case.parallel, optimizer, fp8=case.fp8, token_cap=case.cap)
        logp = actor.log_probs(rows_of(ROWS)).logp
        told = []
        for _ in range(STEPS):
            metrics = actor.step(given(rows_of(ROWS)), cross_entropy_loss())
            told.append((metrics["loss"], metrics["grad_norm"]))
        result.append((told, logp))
    return result


def found(folder: Path, cases: dict[str, Case]) -> dict[str, Found]:
    """Cases of as many processes are computed in the same ones, one after the other."""
    result = {}
    for ranks in sorted({case.ranks for case in cases.values()}):
        alike = {name: case for name, case in cases.items() if case.ranks == ranks}
        ours, *_ = run_ranks(ranks, body, folder, [*alike.values()], preloaded=TRANSFORMER_ENGINE)
        result |= dict(zip(alike, ours, strict=True))
    return result


CASES = {
    "one process": Case(P()),
    "exact": Case(P(), fp8="none"),
    "smaller micro-batches": Case(P(), cap=32),
    "CP2": Case(P(context=2), 2),
    "TP2": Case(P(tensor=2, sequence=True), 2),
}
MORE = {"DP2": Case(P(), 2), "PP2": Case(P(pipeline=2), 2, cap=32)}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return found(save_tiny(tmp_path_factory.mktemp("dense"), "qwen3"), CASES)


def test_products_are_rounded_and_learn_what_others_do(dense: dict[str, Found]) -> None:
    told, logp = dense["one process"]
    exact, plain = dense["exact"]
    assert 1e-3 < (logp - plain).abs().max() < 0.5
    for ours, theirs in zip(told, exact, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    assert told[-1][0] < told[0][0] - 0.05


def assert_same(ours: Found, theirs: Found) -> None:
    for mine, others in zip(ours[0], theirs[0], strict=True):
        assert mine == pytest.approx(others, rel=1e-4)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["smaller micro-batches", "CP2"])
def test_a_token_has_the_same_numbers_whatever_is_beside_it(
    name: str, dense: dict[str, Found]
) -> None:
    assert_same(dense[name], dense["one process"])


@pytest.mark.ranks
def test_a_token_has_the_same_numbers_on_whichever_process_it_is(
    dense: dict[str, Found], tmp_path: Path
) -> None:
    for ours in found(save_tiny(tmp_path, "qwen3"), MORE).values():
        assert_same(ours, dense["one process"])


def test_shards_of_matrices_are_rounded_by_themselves(dense: dict[str, Found]) -> None:
    for mine, theirs in zip(dense["TP2"][0], dense["one process"][0], strict=True):
        assert mine == pytest.approx(theirs, rel=0.05)


@pytest.mark.ranks
def test_experts_of_8_bits_are_spread_without_another_result(tmp_path: Path) -> None:
    cases = {"one process": Case(P()), "EP2": Case(P(expert=2), 2)}
    ours = found(save_tiny(tmp_path, "qwen3-moe"), cases)
    assert_same(ours["EP2"], ours["one process"])
