"""Two losses in one accumulation, against a double loop in float64: each is averaged over its own
tokens or answers.
"""

from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from rftmega.algorithms.aggregation import aggregation_of
from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.backends.runner.auxiliary import beside, counted
from rftmega.core import ragged
from rftmega.core.types import Auxiliary, Experience, Rows, TokenStats
from rftmega.trainer.experience import given

COEF, LONGEST = 0.3, 6
PROMPTS, LENGTHS = [2, 1, 3, 1], [5, 2, 9, 1]  # the last has no answer
OTHERS, OTHER_LENGTHS = [1, 2, 2], [3, 8, 3]


def experience_of(prompts: list[int], lengths: list[int]) -> Experience:
    rows = Rows.of_completions(
        torch.zeros(len(lengths), max(lengths), dtype=torch.int64),
        torch.tensor(prompts),
        torch.tensor(lengths),
    )
    return given(rows)


def rewarded(left_out: bool) -> Experience:
    torch.manual_seed(0)
    plain = experience_of(PROMPTS, LENGTHS)
    logp = torch.randn(plain.mask.shape, dtype=torch.float64)
    advantage = torch.randn_like(logp)
    mask = plain.mask & (not left_out)
    return Experience(
        plain.tokens, plain.prompt_lengths, plain.lengths, mask, logp, logp, None, advantage
    )


def accumulated(losses: list[Any]) -> Tensor:
    """What Megatron does: sums of all micro-batches, divided once by the count of all."""
    return sum((loss.value * loss.weight).sum() for loss in losses) / max(
        sum(int(loss.count) for loss in losses), 1
    )


def by_hand(
    first: Experience, logp: Tensor, second: Experience, other: Tensor, aggregation: str
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for experience, x, coef in ((first, logp, 1.0), (second, other, COEF)):
        completions = []
        for b in range(len(experience)):
            terms = []
            for t in range(x.shape[1]):
                if experience.mask[b, t]:
                    ratio = torch.exp(x[b, t] - experience.old_logp[b, t])
                    terms.append(
                        -x[b, t] if experience is second else -ratio * experience.advantage[b, t]
                    )
            if terms:
                completions.append(terms)
        if aggregation == "token_mean":
            parts = [sum(terms) / sum(map(len, completions)) for terms in completions]
        else:
            parts = [
                sum(terms)
                / (len(terms) if aggregation == "sequence_mean" else LONGEST)
                / len(completions)
                for terms in completions
            ]
        total = total + coef * sum(parts, torch.zeros((), dtype=torch.float64))
    return total


@settings(max_examples=40, deadline=None)
@drawn(
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"]),
    cut=st.integers(0, 4), other_cut=st.integers(0, 3), left_out=st.booleans(),
)  # fmt: skip
def test_value_and_gradient_are_the_sum_of_two_means_however_they_are_split(
    aggregation: str, cut: int, other_cut: int, left_out: bool
) -> None:
    first, second = rewarded(left_out), experience_of(OTHERS, OTHER_LENGTHS)
    chosen = aggregation_of(aggregation, longest=LONGEST)
    auxiliary = Auxiliary("ptx", second, cross_entropy_loss(chosen), COEF)
    loss_fn = policy_loss(aggregation=chosen)
    other_fn = beside(loss_fn, first, auxiliary, TokenStats)
    logp = first.old_logp.clone().requires_grad_()
    other = torch.randn(
        second.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    losses = []
    for experience, fn, x, at in (
        (first, loss_fn, logp, cut),
        (second, other_fn, other, other_cut),
    ):
        for index in torch.arange(len(experience)).tensor_split([at]):
            part = experience.select(index)
            losses.append(fn(TokenStats(x[index, : part.mask.shape[1]], None), part))
    found, wanted = accumulated(losses), by_hand(first, logp, second, other, aggregation)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    for x in (logp, other):
        (one,), (two,) = (
            torch.autograd.grad(y, x, retain_graph=True, allow_unused=True) for y in (found, wanted)
        )
        torch.testing.assert_close(
            one, torch.zeros_like(x) if two is None else two, rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("left_out", [False, True])
def test_its_metrics_are_means_over_its_own_tokens(left_out: bool) -> None:
    first, second = rewarded(left_out), experience_of(OTHERS, OTHER_LENGTHS)
    loss_fn = policy_loss()
    other_fn = beside(
        loss_fn, first, Auxiliary("ptx", second, cross_entropy_loss(), COEF), TokenStats
    )
    x = torch.randn(second.mask.shape, dtype=torch.float64)
    losses = [loss_fn(TokenStats(first.old_logp, None), first), other_fn(TokenStats(x, x), second)]
    shown = {
        name: float((m.value * m.weight).sum() / m.count) for name, m in losses[1].metrics.items()
    }
    assert shown["ptx_cross_entropy"] == pytest.approx(-float(x[second.mask].mean()))
    assert shown["ptx_entropy"] == pytest.approx(float(x[second.mask].mean()))


def test_a_count_is_that_of_all_rows_however_few_are_padded_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = experience_of(OTHERS, OTHER_LENGTHS)
    answered = sum(OTHER_LENGTHS) - sum(OTHERS)
    for most in (1, 8, 1000):
        monkeypatch.setattr(ragged, "CHUNK", most)
        assert counted(cross_entropy_loss(), second.ragged(), TokenStats) == answered
