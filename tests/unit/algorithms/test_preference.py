"""Preference losses against a loop in float64, and against TRL's own (tests/trl_preference.py)."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.preference import preference_loss
from rftmega.config.options.preference import (
    DPO,
    KTO,
    ORPO,
    PreferenceIPO,
    PreferenceLoss,
    SimPO,
)
from rftmega.core.types import Experience, Rows, TokenLoss, TokenStats
from rftmega.trainer.experience import given

OF_TRL = json.loads((Path(__file__).parent / "trl_preference.json").read_text())
TYPES = {"dpo": DPO, "ipo": PreferenceIPO, "simpo": SimPO, "kto": KTO, "orpo": ORPO}
LENGTHS, PROMPTS = [6, 3, 4, 7, 9, 5, 3, 8], [2, 2, 3, 3, 1, 1, 2, 2]
LABELS = [True, True, False, True, False, False, False, True]
PAIRED = [
    DPO(beta=0.7),
    DPO(beta=0.3, label_smoothing=0.2, nll_coef=0.4),
    PreferenceIPO(beta=0.6),
    SimPO(beta=1.7, gamma=0.6),
    ORPO(coef=0.9),
]
ALL = [*PAIRED, KTO(beta=0.8, desirable_weight=1.5, undesirable_weight=0.6)]


def experience_of(
    lengths: list[int], prompts: list[int], labels: list[bool], reference: Tensor, baseline: float
) -> Experience:
    rows = Rows.of_completions(
        torch.zeros(len(lengths), max(lengths), dtype=torch.int64),
        torch.tensor(prompts),
        torch.tensor(lengths),
    )
    rows = replace(rows, desirable=torch.tensor(labels), reference_sum=reference)
    return replace(given(rows), kl_baseline=torch.full((len(lengths),), baseline).double())


def drawn(seed: int) -> tuple[Experience, Tensor]:
    """Rows of random log-probs, with other values outside of the responses, which nothing may read."""
    torch.manual_seed(seed)
    reference = -6 * torch.rand(len(LENGTHS), dtype=torch.float64)
    labels = [bool(row % 2 == 0) for row in range(len(LENGTHS))]
    experience = experience_of(LENGTHS, PROMPTS, labels, reference, 0.37)
    logp = -2 * torch.rand(experience.mask.shape, dtype=torch.float64)
    return experience, logp.requires_grad_()


def reduced(loss: TokenLoss) -> Tensor:
    return (loss.value * loss.weight).sum() / loss.count


def metric(loss: TokenLoss, name: str) -> float:
    found = loss.metrics[name]
    return float((found.value * found.weight).sum() / found.count)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def response_of(logp: Tensor, row: int) -> list[float]:
    return [float(logp[row, place - 1]) for place in range(PROMPTS[row], LENGTHS[row])]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def pair_by_hand(
    options: PreferenceLoss, chosen: list[float], rejected: list[float], ratios: tuple[float, float]
) -> float:
    """The loss of one pair, from its tokens' log-probs and its two log-ratios."""
    if isinstance(options, DPO):
        margin, wrong = options.beta * (ratios[0] - ratios[1]), options.label_smoothing
        own = -(1 - wrong) * math.log(sigmoid(margin)) - wrong * math.log(sigmoid(-margin))
        return own - options.nll_coef * mean(chosen)
    if isinstance(options, PreferenceIPO):
        margin = ratios[0] / len(chosen) - ratios[1] / len(rejected)
        return (margin - 1 / (2 * options.beta)) ** 2
    if isinstance(options, SimPO):
        margin = options.beta * mean(chosen) - options.beta * mean(rejected)
        return -math.log(sigmoid(margin - options.gamma))
    assert isinstance(options, ORPO)
    better, worse = math.exp(mean(chosen)), math.exp(mean(rejected))
    odds = better / (1 - better) / (worse / (1 - worse))
    return -mean(chosen) - options.coef * math.log(sigmoid(math.log(odds)))


def by_hand(options: PreferenceLoss, experience: Experience, logp: Tensor) -> float:
    assert experience.reference_sum is not None and experience.desirable is not None
    answers = [response_of(logp, row) for row in range(len(LENGTHS))]
    ratios = [
        sum(own) - float(ref) for own, ref in zip(answers, experience.reference_sum, strict=True)
    ]
    total = 0.0
    if isinstance(options, KTO):
        for ratio, good in zip(ratios, experience.desirable.tolist(), strict=True):
            if good:
                total += options.desirable_weight * (1 - sigmoid(options.beta * (ratio - 0.37)))
            else:
                total += options.undesirable_weight * (1 - sigmoid(options.beta * (0.37 - ratio)))
        return total / len(ratios)
    for pair in range(len(answers) // 2):
        a, b = 2 * pair, 2 * pair + 1
        total += pair_by_hand(options, answers[a], answers[b], (ratios[a], ratios[b]))
    return total / (len(answers) // 2)


@pytest.mark.parametrize("options", ALL, ids=lambda each: each.type)
@pytest.mark.parametrize("seed", range(2))
def test_a_preference_loss_and_its_gradient_are_those_of_its_formula(
    options: PreferenceLoss, seed: int
) -> None:
    experience, logp = drawn(seed)
    found = reduced(preference_loss(options)(TokenStats(logp, None), experience))
    found.backward()
    plain = logp.detach()
    assert found.item() == pytest.approx(by_hand(options, experience, plain), rel=1e-6)
    assert logp.grad is not None
    for row, place in [(0, 1), (0, 4), (1, 1), (5, 3), (7, 6), (2, 0), (2, 3)]:
        moved = [plain.clone(), plain.clone()]
        moved[0][row, place] -= 1e-5
        moved[1][row, place] += 1e-5
        below, above = (by_hand(options, experience, each) for each in moved)
        slope = (above - below) / 2e-5
        assert logp.grad[row, place].item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


def of_trl(case: dict[str, Any]) -> tuple[TokenLoss, Tensor, Experience]:
    """Our loss on TRL's log-probs, behind prompts of different lengths."""
    data = OF_TRL["data"]
    prompts = [1 + number % 3 for number in range(len(data["logp"]))]
    lengths = [len(row) + own for row, own in zip(data["logp"], prompts, strict=True)]
    kto = case["type"] == "kto"
    labels = data["desirable"] if kto else [number % 2 == 0 for number in range(len(lengths))]
    reference = torch.tensor(data["reference"], dtype=torch.float64)
    baseline = mean(data["kl_logp"]) - mean(data["kl_reference"])
    experience = experience_of(lengths, prompts, labels, reference, max(baseline, 0.0))
    logp = torch.full(experience.mask.shape, -3.0, dtype=torch.float64)
    logp[experience.mask] = torch.tensor(
        [x for row in data["logp"] for x in row], dtype=torch.float64
    )
    logp.requires_grad_()
    options = TYPES[case["type"]](**case["options"])
    return preference_loss(options, paired=not kto)(TokenStats(logp, None), experience), logp, experience  # fmt: skip


@pytest.mark.parametrize("case", OF_TRL["cases"], ids=lambda case: case["type"])
def test_a_preference_loss_its_gradient_and_metrics_are_those_of_trl(case: dict[str, Any]) -> None:
    loss, logp, experience = of_trl(case)
    found = reduced(loss)
    found.backward()
    assert found.item() == pytest.approx(case["loss"], rel=1e-6)
    wanted = torch.tensor([x for row in case["gradient"] for x in row], dtype=torch.float64)
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad[experience.mask], wanted, rtol=1e-5, atol=1e-7)
    names = {"rewards/chosen": "chosen_reward", "rewards/rejected": "rejected_reward", "kl": "kl"}
    if case["type"] not in ("simpo", "orpo"):  # these metrics of TRL are of another quantity there
        names |= {"logps/chosen": "chosen_logp", "logps/rejected": "rejected_logp"}
    if case["type"] != "kto":
        names |= {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
    for theirs, ours in names.items():
        if theirs in case["metrics"]:
            assert metric(loss, ours) == pytest.approx(case["metrics"][theirs], rel=1e-5), ours


@pytest.mark.parametrize("options", ALL, ids=lambda each: each.type)
def test_a_preference_loss_is_the_sum_of_its_micro_batches(options: PreferenceLoss) -> None:
    experience, logp = drawn(3)
    whole = preference_loss(options)(TokenStats(logp, None), experience)
    parts = []
    for rows in (torch.arange(2), torch.arange(2, 8), torch.arange(0)):
        own = experience.select(rows)
        parts.append(
            preference_loss(options)(
                TokenStats(logp[rows, : own.mask.shape[1]], None), own
            )
        )  # fmt: skip
    total = sum(float((part.value * part.weight).sum().detach()) for part in parts)
    count = sum(int(part.count) for part in parts)
    units = len(LENGTHS) if isinstance(options, KTO) else len(LENGTHS) // 2
    assert count == int(whole.count) == units
    assert total / count == pytest.approx(reduced(whole).item(), rel=1e-6)
    assert {*parts[2].metrics} == {*whole.metrics}, "a stage without rows asks for the names"


def test_the_accuracy_of_single_responses_is_the_share_on_the_right_side_of_the_baseline() -> None:
    experience, logp = drawn(5)
    experience = replace(experience, desirable=torch.tensor(LABELS))
    loss = preference_loss(KTO(beta=0.8), paired=False)(TokenStats(logp, None), experience)
    assert experience.reference_sum is not None
    ratios = [
        sum(response_of(logp.detach(), row)) - float(experience.reference_sum[row])
        for row in range(len(LENGTHS))
    ]
    right = [(ratio > 0.37) == good for ratio, good in zip(ratios, LABELS, strict=True)]
    assert metric(loss, "accuracy") == pytest.approx(sum(right) / len(right))
    chosen = [0.8 * ratio for ratio, good in zip(ratios, LABELS, strict=True) if good]
    assert metric(loss, "chosen_reward") == pytest.approx(mean(chosen), rel=1e-5)


def test_a_response_of_probability_1_has_finite_odds() -> None:
    experience, _ = drawn(0)
    logp = torch.zeros(experience.mask.shape, requires_grad=True)
    loss = reduced(preference_loss(ORPO())(TokenStats(logp, None), experience))
    loss.backward()
    assert logp.grad is not None and logp.grad.isfinite().all() and loss.isfinite()
