"""Random streams: everything of a process is seeded, and dropout differs or agrees between
processes where it must.
"""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience
from rftmega.runtime.parallel.seeds import set_seed
from rftmega.runtime.parallel.topology import Topology
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig


def draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def test_set_seed_covers_python_numpy_and_torch() -> None:
    set_seed(11)
    first = draw()
    set_seed(12)
    other = draw()
    set_seed(11)
    assert draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


STREAMS = (P(), P(tensor=2), P(pipeline=2), P(context=2), P(tensor=2, pipeline=2))


def streams_body(world: Any) -> list[Any]:
    return [streams(parallel) for parallel in STREAMS]


def streams(parallel: ParallelConfig) -> Any:
    topology = Topology.create(parallel, seed=1)
    common = float(torch.rand(()))  # what hidden dropout draws from
    # what attention dropout, and hidden dropout under SP, draw from
    with get_cuda_rng_tracker().fork():
        own = float(torch.rand(()))
    return (
        (topology.data_rank, topology.context_rank, topology.pipeline_rank, topology.tensor_rank),
        common,
        own,
    )


def test_streams_agree_within_tensor_parallelism_and_differ_elsewhere() -> None:
    for parallel, *found in zip(STREAMS, *run_ranks(8, streams_body), strict=True):
        by_tokens: dict[tuple[int, ...], set[float]] = {}
        for (*tokens, _), common, _ in found:
            by_tokens.setdefault(tuple(tokens), set()).add(common)
        assert all(len(values) == 1 for values in by_tokens.values()), parallel
        assert len(set.union(*by_tokens.values())) == len(by_tokens), parallel
        assert len({own for _, _, own in found}) == 8, parallel


def dropout_body(world: Any, folder: Path, cases: list[tuple[ParallelConfig, float]]) -> list[Any]:
    """Of each layout and dropout, one after the other."""
    return [learnt(folder, parallel, dropout) for parallel, dropout in cases]


def learnt(folder: Path, parallel: ParallelConfig, dropout: float) -> Any:
    actor = build_actor(
        folder, parallel, OptimizerConfig(epsilon=1e-4, learning_rate=1e-2), dropout=dropout
    )
    rows = rows_of([[1, 2, 3, 4, 9, 8], [5, 6, 7], [7, 8, 9, 10, 11], [3, 1, 2]])
    first, second = (actor.log_probs(rows).logp for _ in range(2))
    experience = Experience(
        rows.tokens,
        rows.prompt_lengths,
        rows.lengths,
        rows.mask,
        first,
        first,
        None,
        torch.ones_like(first),
    )
    metrics = [actor.step(experience, policy_loss()) for _ in range(2)]
    return torch.equal(first, second), [m["grad_norm"] for m in metrics], actor.log_probs(rows).logp


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        pytest.param(1, P(), marks=pytest.mark.ranks),
        pytest.param(1, P(recompute="full"), marks=pytest.mark.ranks),
        pytest.param(1, P(recompute="selective"), marks=pytest.mark.ranks),
        pytest.param(2, P(tensor=2), marks=pytest.mark.ranks),
        (2, P(tensor=2, sequence=True)),
        pytest.param(
            4,
            P(tensor=2, pipeline=2, sequence=True, recompute="full"),
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_dropout_acts_on_learning_only_and_keeps_replicas_equal(
    processes: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    cases = [(parallel, 0.0), (parallel, 0.2)]
    ranks = run_ranks(processes, dropout_body, folder, cases)
    without, found = ranks[0][0], [each for _, each in ranks]
    for scores_repeat, norms, logp in found:
        assert scores_repeat, "scoring drops"
        assert all(abs(a - b) > 1e-3 for a, b in zip(norms, without[1], strict=True)), (
            "learning does not drop"
        )
        assert norms == found[0][1]
        assert torch.equal(logp, found[0][2]), "replicated weights drifted apart"


def test_a_recomputed_forward_drops_what_the_first_one_dropped(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    cases = [(P(recompute=kind), 0.2) for kind in ("none", "full", "selective")]
    ((plain, full, selective),) = run_ranks(1, dropout_body, folder, cases)
    assert full[1] == pytest.approx(plain[1], rel=1e-5)
    assert selective[1] == pytest.approx(plain[1], rel=1e-5)
