"""Padding, the order of rows, the split into micro-batches and ranks, and the dtype change no loss,
gradient or advantage.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from rftmega.algorithms.advantages import Scored, advantages
from rftmega.algorithms.aggregation import aggregation_of
from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.supervised import cross_entropy_loss, pairwise_loss
from rftmega.algorithms.values import value_loss
from rftmega.config.options.algorithms import (
    CISPO,
    CPGD,
    DPPO,
    GAE,
    GMPO,
    GSPO,
    IPO,
    SAPO,
    Clip,
    GroupNorm,
    IcePop,
    LeaveOneOut,
    MaskedImportance,
    MaxRL,
    NoImportance,
    PassAtK,
    Returns,
    ScoreFunction,
    SequenceImportance,
    TokenImportance,
)
from rftmega.core.types import Experience, Rows, TokenStats, TokenValues
from tests.columns import ragged

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
POLICY_LOSSES = (
    Clip(low=0.1, high=0.3, dual=2.0),
    GSPO(low=0.1, high=0.3),
    CISPO(low=0.1, high=0.3),
    CPGD(low=0.1, high=0.3, drift_coef=0.2),
    ScoreFunction(),
    SAPO(),
    GMPO(low=0.1, high=0.3),
    DPPO(low=0.1, high=0.15, drift_coef=0.1),
    IPO(),
)
CORRECTIONS = (
    NoImportance(),
    TokenImportance(cap=1.3),
    SequenceImportance(cap=1.3),
    MaskedImportance(cap=1.3),
    IcePop(low=0.8, high=1.3),
)
ESTIMATORS = {
    part.type: part
    for part in (
        GroupNorm(),
        LeaveOneOut(),
        Returns(gamma=0.9),
        GAE(gamma=0.9, lam=0.8),
        MaxRL(),
        PassAtK(k=2),
    )
}
LENGTHS, PROMPTS = [9, 4, 2, 6, 9, 3, 5, 7], [2, 1, 2, 3, 1, 1, 2, 4]  # row 2 has no answer


def weighted(aggregation: str) -> Any:
    return aggregation_of(aggregation, longest=8)


LOSSES: dict[str, Callable[[str], Any]] = {
    **{
        f"{chosen.type}, {correction.type}": lambda aggregation, chosen=chosen, correction=correction: policy_loss(
            options=chosen, correction=correction, high_entropy_share=0.6, kl_coef=0.2,
            kl_estimator="k2", entropy_coef=0.1, aggregation=weighted(aggregation),
        )
        for chosen in POLICY_LOSSES
        for correction in CORRECTIONS
    },
    "value": lambda aggregation: value_loss(clip=0.3, aggregation=weighted(aggregation)),
    "value, huber": lambda aggregation: value_loss(huber=0.5, aggregation=weighted(aggregation)),
    "cross entropy": lambda aggregation: cross_entropy_loss(weighted(aggregation)),
    "pairwise": lambda aggregation: pairwise_loss(),
}  # fmt: skip


def of_values(name: str) -> bool:
    return name.startswith(("value", "pairwise"))


def experience_of(name: str) -> tuple[Experience, Tensor]:
    torch.manual_seed(0)
    rows = Rows.of_completions(
        torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64),
        torch.tensor(PROMPTS),
        torch.tensor(LENGTHS),
    )
    if name == "pairwise":
        rows = rows.with_end()

    def numbers() -> Tensor:
        return torch.randn(rows.mask.shape, dtype=torch.float64)

    old = numbers()
    found = Experience(
        rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, behaviour_logp=old + 0.3 * numbers(), old_logp=old,
        reference_logp=numbers(), advantage=numbers(), old_value=old, returns=numbers(),
    )  # fmt: skip
    return found, old + 0.4 * numbers()


def trained(
    name: str, aggregation: str, experience: Experience, x: Tensor, parts: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """(loss, gradient by what the model says), summed over parts of the rows and divided once."""
    loss_fn, total, count = LOSSES[name](aggregation), torch.zeros((), dtype=x.dtype), 0
    free = x.clone().requires_grad_()
    for index in parts:
        part = experience.select(index)
        said = free[index, : part.mask.shape[1]]
        loss = loss_fn(TokenValues(said) if of_values(name) else TokenStats(said, said.sin()), part)
        total, count = total + (loss.value * loss.weight).sum(), count + int(loss.count)
    (total / max(count, 1)).backward()
    assert free.grad is not None
    return total.detach() / max(count, 1), free.grad


@settings(max_examples=60)
@drawn(
    name=st.sampled_from(list(LOSSES)), aggregation=st.sampled_from(AGGREGATIONS), padding=st.integers(0, 3),
    poison=st.booleans(), order=st.permutations(range(len(LENGTHS) // 2)), cuts=st.sets(st.integers(1, len(LENGTHS) // 2 - 1)),
)  # fmt: skip
def test_a_loss_and_its_gradient_depend_on_nothing_but_the_rows(
    name: str, aggregation: str, padding: int, poison: bool, order: list[int], cuts: set[int]
) -> None:
    """Rows move in pairs, since one of the losses compares them."""
    experience, x = experience_of(name)
    everything = torch.arange(len(LENGTHS))
    value, gradient = trained(name, aggregation, experience, x, [everything])

    def wider(tensor: Tensor) -> Tensor:
        filling = float("nan") if poison and tensor.is_floating_point() else 0
        return pad(tensor, (0, padding), value=filling) if tensor.dim() == 2 else tensor

    wide = replace(
        experience,
        **{
            f.name: wider(held)
            for f in fields(experience)
            if isinstance(held := getattr(experience, f.name), Tensor)
        },
    )
    shuffled = torch.tensor([2 * pair + i for pair in order for i in (0, 1)])
    edges = [0, *(2 * cut for cut in sorted(cuts)), len(LENGTHS)]
    found, moved = trained(
        name, aggregation, wide, wider(x), [shuffled[a:b] for a, b in pairwise(edges)]
    )
    torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(moved[:, : x.shape[1]], gradient, rtol=1e-6, atol=1e-9)
    assert not moved[:, x.shape[1] :].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_float32_gives_the_loss_and_gradient_of_float64(name: str, aggregation: str) -> None:
    experience, x = experience_of(name)
    everything = [torch.arange(len(LENGTHS))]
    value, gradient = trained(name, aggregation, experience, x, everything)
    single = experience.changed(lambda x: x.float() if x.is_floating_point() else x)
    found, rounded = trained(name, aggregation, single, x.float(), everything)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rounded.double(), gradient, rtol=1e-4, atol=1e-6)


def found_by(
    name: str, index: Tensor, padding: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Of rows `index` of eight answers in three groups of holes and padding."""
    torch.manual_seed(1)
    reward, group = (
        torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 1.0, 0.3, 0.3]),
        torch.tensor([0, 1, 0, 1, 2, 2, 0, 1]),
    )
    mask = (torch.rand(8, 6) < 0.7) & (
        torch.arange(6) < torch.tensor([6, 5, 3, 1, 6, 4, 2, 6])[:, None]
    )
    values, penalty = (
        torch.randn(8, 6, dtype=torch.float64),
        0.1 * torch.randn(8, 6, dtype=torch.float64),
    )
    wide = [
        pad(x[index], (0, padding), value=7.0 if x.is_floating_point() else 0)
        for x in (mask, values, penalty)
    ]
    columns = [ragged(x if x.dtype == torch.bool else x.to(dtype)) for x in wide]
    scored = Scored(reward[index].to(dtype), group[index], *columns)
    return advantages(scored, ESTIMATORS[name]).padded()


@settings(max_examples=40)
@drawn(
    name=st.sampled_from(list(ESTIMATORS)),
    order=st.permutations(range(8)),
    padding=st.integers(0, 3),
)
def test_an_advantage_depends_on_nothing_but_its_group(
    name: str, order: list[int], padding: int
) -> None:
    """Whole groups in another order, and each by itself, as if each lay on a rank of its own."""
    wanted = found_by(name, torch.arange(8))
    index = torch.tensor(order)
    found = found_by(name, index, padding)
    torch.testing.assert_close(found[:, :6], wanted[index], rtol=1e-9, atol=1e-12)
    assert not found[:, 6:].any()
    for group in ([0, 2, 6], [1, 3, 7], [4, 5]):
        torch.testing.assert_close(
            found_by(name, torch.tensor(group), padding)[:, :6],
            wanted[group],
            rtol=1e-9,
            atol=1e-12,
        )


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_an_advantage_in_float32_is_that_in_float64(name: str) -> None:
    everything = torch.arange(8)
    rounded, wanted = found_by(name, everything, dtype=torch.float32), found_by(name, everything)
    torch.testing.assert_close(rounded.double(), wanted.double(), rtol=1e-4, atol=1e-5)


def with_hole(tensor: Tensor, at: int, width: int, fill: float) -> Tensor:
    """Columns that no policy chose, before column `at` of what is [B, T]."""
    if tensor.dim() == 1:
        return tensor
    hole = torch.full((len(tensor), width), fill).to(tensor.dtype)
    return torch.cat([tensor[:, :at], hole, tensor[:, at:]], dim=1)


@settings(max_examples=80)
@drawn(
    name=st.sampled_from(list(LOSSES)), aggregation=st.sampled_from(AGGREGATIONS), at=st.integers(0, 8),
    width=st.integers(1, 4), poison=st.booleans(),
)  # fmt: skip
def test_a_loss_and_its_gradient_are_those_of_rows_without_what_a_tool_said(
    name: str, aggregation: str, at: int, width: int, poison: bool
) -> None:
    experience, x = experience_of(name)
    everything = torch.arange(len(LENGTHS))
    value, gradient = trained(name, aggregation, experience, x, [everything])

    def holed(tensor: Tensor) -> Tensor:
        filling = (float("nan") if poison else 3.0) if tensor.is_floating_point() else 0
        return with_hole(tensor, at, width, filling)

    longer = experience.changed(holed)
    # column t speaks about token t + 1, and rows that end before the hole are as long as ever
    reaches = experience.lengths > at + 1
    longer = replace(longer, lengths=experience.lengths + width * reaches)
    found, slope = trained(name, aggregation, longer, with_hole(x, at, width, 3.0), [everything])
    torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-14)
    assert not slope[:, at : at + width].any(), "what a tool said is learnt from"
    without = torch.cat([slope[:, :at], slope[:, at + width :]], dim=1)
    torch.testing.assert_close(without, gradient, rtol=1e-12, atol=1e-14)
