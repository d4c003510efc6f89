import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.aggregation import AGGREGATIONS, sequence_mean, token_mean
from rftmega.algorithms.losses import policy_loss
from rftmega.config.options.algorithms import Clip, NoPolicyLoss, TokenImportance
from rftmega.core.types import Experience, TokenStats
from rftmega.models.kernels.linear_divergence import DivergenceKind
from rftmega.models.kernels.teacher_terms import sampled_divergence


def experience_of(
    old_logp: list[list[float]], lengths: list[int], advantage: list[list[float]]
) -> Experience:
    """Prompts of one token; row b has lengths[b] tokens in all."""
    old = torch.tensor(old_logp)
    size = torch.tensor(lengths)
    mask = torch.arange(1, old.shape[1] + 1) < size[:, None]
    return Experience(
        tokens=torch.zeros(len(old), old.shape[1] + 1, dtype=torch.int64),
        prompt_lengths=torch.ones(len(old), dtype=torch.int64),
        lengths=size,
        mask=mask,
        behaviour_logp=old,
        old_logp=old,
        reference_logp=old - 0.3,
        advantage=torch.tensor(advantage),
    )


def ragged(seed: int = 0) -> tuple[Experience, Tensor]:
    torch.manual_seed(seed)
    old = -torch.rand(3, 4)
    experience = experience_of(old.tolist(), [5, 2, 1], torch.randn(3, 1).expand(3, 4).tolist())
    return experience, (old + 0.5 * torch.randn(3, 4)).requires_grad_()


def by_hand(
    experience: Experience, logp: Tensor, low: float, high: float, kl_coef: float, aggregation: str
) -> float:
    """A double loop in float64 straight from the papers."""
    total, things = 0.0, 0
    for b in range(len(experience)):
        length = int(experience.lengths[b]) - 1
        things += length if aggregation == "token_mean" else int(length > 0)
        for t in range(length):
            ratio = math.exp(float(logp[b, t]) - float(experience.old_logp[b, t]))
            a = float(experience.advantage[b, t])
            delta = float(logp[b, t]) - float(experience.reference_logp[b, t])
            value = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a) + kl_coef * (
                math.exp(-delta) - 1 + delta
            )
            total += value * (1.0 / length if aggregation == "sequence_mean" else 1.0)
    return total / things


def reduced(experience: Experience, logp: Tensor, **settings: object) -> Tensor:
    loss = policy_loss(**settings)(TokenStats(logp, None), experience)
    return (loss.value * loss.weight).sum() / loss.count


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
def test_it_equals_the_formula(aggregation: str, low: float, high: float) -> None:
    for seed in range(5):
        experience, logp = ragged(seed)
        found = reduced(
            experience,
            logp,
            options=Clip(low=low, high=high),
            kl_coef=0.1,
            aggregation=AGGREGATIONS[aggregation],
        )
        assert found.item() == pytest.approx(
            by_hand(experience, logp.detach(), low, high, 0.1, aggregation), rel=1e-5
        )


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "moves"),
    [
        (1.0, 0.5, False),
        (1.0, -0.5, True),
        (-1.0, -0.5, False),
        (-1.0, 0.5, True),
        (1.0, 0.1, True),
    ],
)
def test_the_gradient_is_zero_exactly_where_the_clip_bites(
    advantage: float, log_ratio: float, moves: bool
) -> None:
    experience = experience_of([[-1.0]], [2], [[advantage]])
    logp = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)
    reduced(experience, logp).backward()
    assert bool(logp.grad.abs().sum() > 0) is moves


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 100.0, -100.0])
def test_what_stands_in_padding_changes_neither_loss_nor_gradient(poison: float) -> None:
    experience, logp = ragged()
    clean = torch.where(experience.mask, logp.detach(), 0.0).requires_grad_()
    dirty = torch.where(experience.mask, logp.detach(), poison).requires_grad_()
    bad_advantage = replace(
        experience, advantage=torch.where(experience.mask, experience.advantage, poison)
    )
    a, b = reduced(experience, clean, kl_coef=0.1), reduced(bad_advantage, dirty, kl_coef=0.1)
    a.backward()
    b.backward()
    assert a.item() == b.item()
    assert torch.equal(clean.grad, dirty.grad)


@pytest.mark.parametrize(
    ("log_ratio", "advantage"), [(94.0, 1.0), (94.0, -1.0), (-200.0, 1.0), (-200.0, -1.0)]
)
def test_extreme_ratios_have_finite_values_and_gradients(
    log_ratio: float, advantage: float
) -> None:
    experience = experience_of([[-1.0]], [2], [[advantage]])
    logp = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)
    loss = reduced(experience, logp)
    loss.backward()
    assert loss.isfinite()
    assert logp.grad.isfinite().all()


def test_splitting_a_batch_does_not_change_its_gradient() -> None:
    experience, logp = ragged()
    for aggregation in (token_mean, sequence_mean):
        loss_fn = policy_loss(kl_coef=0.1, aggregation=aggregation)

        def gradient(parts: list[Tensor], loss_fn: object = loss_fn) -> Tensor:
            x = logp.detach().clone().requires_grad_()
            losses = []
            for rows in parts:
                part = experience.select(rows)
                losses.append(loss_fn(TokenStats(x[rows][:, : part.mask.shape[1]], None), part))
            total = sum((loss.value * loss.weight).sum() for loss in losses)
            (total / sum(loss.count for loss in losses)).backward()
            return x.grad

        whole = gradient([torch.arange(3)])
        for parts in ([[0], [1], [2]], [[2, 0], [1]], [[1, 2], [0]]):
            torch.testing.assert_close(gradient([torch.tensor(p) for p in parts]), whole)


def test_a_batch_of_no_rows_and_one_of_empty_answers_have_count_zero_and_the_same_metrics() -> None:
    experience, logp = ragged()
    loss_fn = policy_loss(kl_coef=0.1)
    names = set(loss_fn(TokenStats(logp, logp), experience).metrics)
    for rows in ([], [2]):
        part = experience.select(torch.tensor(rows, dtype=torch.int64))
        loss = loss_fn(TokenStats(part.old_logp, part.old_logp), part)
        assert int(loss.count) == 0
        assert set(loss.metrics) == names
        assert (loss.value * loss.weight).sum() == 0


def test_the_entropy_bonus_pushes_entropy_up() -> None:
    experience, logp = ragged()
    entropy = torch.rand(3, 4, requires_grad=True)
    loss = policy_loss(entropy_coef=0.5)(TokenStats(logp, entropy), experience)
    ((loss.value * loss.weight).sum() / loss.count).backward()
    expected = -0.5 * experience.mask / experience.mask.sum()
    torch.testing.assert_close(entropy.grad, expected)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_a_divergence_of_sampled_tokens_is_right_on_average_over_tokens_of_another_policy(
    name: Literal["reverse_kl", "forward_kl"],
) -> None:
    """All tokens of a vocabulary, each as often as the policy of an earlier step samples it."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    log_q, log_b = (torch.randn(6, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    pair = (log_p, log_q) if name == "reverse_kl" else (log_q, log_p)
    exact = (pair[0].exp() * (pair[0] - pair[1])).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    experience = replace(
        experience_of([[0.0]] * 6, [2] * 6, [[0.0]] * 6),
        old_logp=log_p.detach()[:, None],
        behaviour_logp=log_b[:, None],
        reference_logp=None,
    )
    loss_fn = policy_loss(
        options=NoPolicyLoss(),
        correction=TokenImportance(cap=1e9),
        teachers={"expert": 0.5},
        sampled_teachers=["expert"],
    )
    divergence = sampled_divergence(log_p, log_q, DivergenceKind(name))
    loss = loss_fn(
        TokenStats(log_p[:, None], None, divergence=divergence[:, None, None]), experience
    )
    (found,) = torch.autograd.grad((log_b.exp() * loss.value[:, 0]).sum(), logits)
    torch.testing.assert_close(found, 0.5 * wanted)
