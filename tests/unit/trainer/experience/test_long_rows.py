"""Memory of a step's data where one row is much longer than the others."""

from typing import Any

import pytest
import torch

from rftmega.config import AlgorithmConfig, KLConfig
from rftmega.config.options.algorithms import GAE, Returns
from rftmega.core.ragged import PADDED, Ragged
from rftmega.core.types import Prompt, Rows, Samples, TokenStats
from rftmega.trainer.experience import ExperienceMaker
from tests.allocations import most_bytes

LONG, SHORT, ROWS = 131_072, 64, 512


def ragged(lengths: torch.Tensor, dtype: torch.dtype = torch.float32) -> Ragged:
    return Ragged.packed(torch.rand(int(lengths.sum())).to(dtype), lengths)


class Models:
    """Policy and critic that say random numbers."""

    def log_probs(self, rows: Any, *, temperature: float | None = None) -> Any:
        return TokenStats(ragged(rows.lengths - 1), None)

    def reference_log_probs(self, rows: Any) -> Any:
        return TokenStats(ragged(rows.lengths - 1), None)

    def values(self, rows: Any) -> Any:
        return ragged(rows.lengths - 1)


@pytest.mark.parametrize("advantage", [GAE(), Returns()])
@pytest.mark.parametrize("place", [0, ROWS // 2, ROWS - 1])
def test_advantages_take_no_memory_for_padding_to_the_longest_row(
    advantage: Any, place: int
) -> None:
    """All rows padded to the longest would be 67 million numbers, 0.27 GB a column."""
    lengths = torch.full((ROWS,), SHORT)
    lengths[place] = LONG
    mask = ragged(lengths - 1).flat > 0.1
    rows = Rows(
        Ragged.packed(torch.zeros(int(lengths.sum()), dtype=torch.int32), lengths),
        torch.ones(ROWS, dtype=torch.int64),
        lengths,
        Ragged.packed(mask, lengths - 1),
    )
    given = Samples(
        [Prompt((0,))] * ROWS,
        rows,
        ragged(lengths - 1),
        torch.rand(ROWS),
        torch.arange(ROWS) // 4,
        torch.zeros(ROWS, dtype=torch.bool),
        {},
    )
    chosen = AlgorithmConfig(advantage=advantage, kl=KLConfig(placement="reward", coef=0.1))
    critic = Models() if isinstance(advantage, GAE) else None
    maker = ExperienceMaker(Models(), chosen, critic=critic)  # type: ignore[arg-type]
    padded = PADDED * LONG  # numbers of a column
    assert most_bytes(lambda: maker.make(given)) < 16 * 8 * padded
