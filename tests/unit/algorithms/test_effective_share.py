"""How many tokens the importance weights leave, against a plain loop in float64."""

import math
import random

import pytest
import torch

from rftmega.algorithms.mismatch import effective_share
from rftmega.config.options.algorithms import MaskedImportance, SequenceImportance, TokenImportance
from rftmega.config.options.parts import ImportanceSampling
from rftmega.core.ragged import Ragged

LENGTHS = (5, 1, 0, 9, 3, 4)
CAP = 1.5


def rows_of(seed: int) -> tuple[list[list[float]], list[list[float]], list[list[bool]]]:
    """Log-probs of trainer and engine, and a mask with gaps; the last row has nothing of it."""
    drawn = random.Random(seed)
    old = [[-drawn.random() for _ in range(length)] for length in LENGTHS]
    engine = [[value - drawn.gauss(0.0, 0.6) for value in row] for row in old]
    mask = [[drawn.random() < 0.7 for _ in row] for row in old]
    mask[0][0], mask[0][1] = False, True
    mask[-1] = [False] * LENGTHS[-1]
    return old, engine, mask


def looped(kind: str, seed: int) -> float:
    weights: list[float] = []
    for old, engine, mask in zip(*rows_of(seed), strict=True):
        own = [a - b for a, b, trained in zip(old, engine, mask, strict=True) if trained]
        if kind == "token":
            weights += [min(math.exp(ratio), CAP) for ratio in own]
        if kind == "mask":
            weights += [float(1 / CAP <= math.exp(ratio) <= CAP) for ratio in own]
        if kind == "sequence" and own:
            weights.append(min(math.exp(sum(own)), CAP))
    return sum(weights) ** 2 / (len(weights) * sum(weight * weight for weight in weights))


def ragged(rows: list[list[float]] | list[list[bool]], kind: torch.dtype) -> Ragged:
    return Ragged.of([torch.tensor(row, dtype=kind) for row in rows])


@pytest.mark.parametrize(
    "options", [TokenImportance(cap=CAP), SequenceImportance(cap=CAP), MaskedImportance(cap=CAP)]
)
@pytest.mark.parametrize("seed", range(4))
def test_the_effective_share_is_that_of_a_loop_over_ragged_rows(
    options: ImportanceSampling, seed: int
) -> None:
    old, engine, mask = rows_of(seed)
    # what the mask leaves out may hold anything
    old = [
        [value if own else math.nan for value, own in zip(row, kept, strict=True)]
        for row, kept in zip(old, mask, strict=True)
    ]
    found = effective_share(
        ragged(old, torch.float32), ragged(engine, torch.float32), ragged(mask, torch.bool), options
    )
    wanted = looped(options.type, seed)  # type: ignore[attr-defined]
    assert 0 < wanted < 1
    assert found == pytest.approx(wanted, rel=1e-5)


def test_equal_weights_leave_all_tokens_and_no_weight_leaves_none() -> None:
    mask = ragged([[True, True], [True]], torch.bool)
    engine = ragged([[-1.0, -2.0], [-0.5]], torch.float32)
    same = effective_share(engine, engine, mask, TokenImportance())
    assert same == pytest.approx(1.0, abs=1e-12)
    far = engine.with_values(engine.flat + 5.0)
    assert effective_share(far, engine, mask, MaskedImportance()) == 0.0
    nothing = mask.with_values(torch.zeros(3, dtype=torch.bool))
    for options in (TokenImportance(), SequenceImportance(), MaskedImportance()):
        assert effective_share(engine, engine, nothing, options) == 0.0
