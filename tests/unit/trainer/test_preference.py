"""KTO's baseline is one number for a mini-batch, computed before its step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.preference import preference_loss
from rftmega.config.options.preference import KTO
from rftmega.core.types import Experience, LossFn, Metrics, Preferences, Rows, TokenStats
from rftmega.trainer.optimizer_steps import Schedule
from rftmega.trainer.preference import PreferenceTrainer, evaluated

ROWS, LONGEST = 6, 5


class Policy:
    """Its log-probs are a table's, which a step lowers; it keeps the experience of each step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.table = -torch.rand(9, LONGEST - 1) - 0.5
        self.steps: list[Experience] = []

    def log_probs(self, rows: Rows, *, temperature: float | None = None) -> TokenStats:
        assert temperature == 1.0
        return TokenStats(self.table[rows.tokens[:, 0], : rows.mask.shape[1]], None)

    def step(self, experience: Experience, loss_fn: LossFn, *, group_size: int = 1) -> Metrics:
        self.steps.append(experience)
        self.table = self.table * 0.8
        return {"loss": 0.0, "optimizer_steps": 1.0}


def rows_of(first: list[int], reference: Tensor) -> Rows:
    """Rows whose first token is their place in the policy's table."""
    lengths = torch.tensor([3, 4, 5, 2, 5, 3])
    tokens = torch.zeros(ROWS, LONGEST, dtype=torch.int64)
    tokens[:, 0] = torch.tensor(first)
    rows = Rows.of_completions(tokens, torch.ones_like(lengths), lengths)
    labels = torch.tensor([True, False, False, True, True, False])
    return Rows(
        rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask,
        desirable=labels, reference_sum=reference,
    )  # fmt: skip


@pytest.fixture
def data() -> Preferences:
    torch.manual_seed(2)
    reference = -3 - 2 * torch.rand(2, ROWS, dtype=torch.float64)
    mismatched = rows_of([3, 4, 5, 6, 7, 8], reference[1])
    return Preferences(rows_of([0, 1, 2, 3, 4, 5], reference[0]), mismatched)


def by_hand(table: Tensor, rows: Rows, places: list[int]) -> float:
    assert rows.reference_sum is not None
    ratios = []
    for row in places:
        size = int(rows.lengths[row]) - 1
        logp = [float(x) for x in table[int(rows.tokens[row, 0])][:size]]
        ratios.append(sum(logp) - float(rows.reference_sum[row]))
    return max(sum(ratios) / len(ratios), 0.0)


def trainer_of(policy: Policy, data: Preferences, updates: int) -> Any:
    return PreferenceTrainer(
        model=policy,
        policy=policy,
        collate=lambda batch: data,
        loss_fn=preference_loss(KTO(), paired=False),
        group_size=1,
        schedule=Schedule(updates),
    )


def test_the_baseline_is_that_of_the_whole_mini_batch_before_its_step(data: Preferences) -> None:
    policy = Policy()
    trainer = trainer_of(policy, data, 2)
    start = policy.table
    trainer.train_step([])
    assert trainer.step == 1 and len(policy.steps) == 2
    assert data.mismatched is not None
    for table, places, seen in (
        (start, [0, 1, 2], policy.steps[0]),
        (0.8 * start, [3, 4, 5], policy.steps[1]),
    ):
        baseline = seen.kl_baseline
        assert baseline is not None and baseline.unique().numel() == 1 and len(baseline) == 3
        wanted = by_hand(table, data.mismatched, places)
        assert wanted > 0.1, "a baseline of 0 would show nothing"
        assert float(baseline[0]) == pytest.approx(wanted, rel=1e-6)


def test_a_negative_kl_is_taken_for_0(data: Preferences) -> None:
    policy = Policy()
    policy.table = policy.table * 9
    trainer_of(policy, data, 1).train_step([])
    baseline = policy.steps[0].kl_baseline
    assert baseline is not None and baseline.tolist() == [0.0] * ROWS


def test_an_evaluation_has_the_loss_and_the_baseline_of_all_rows(data: Preferences) -> None:
    policy = Policy()
    options = KTO(beta=0.5, desirable_weight=2.0)
    found = evaluated(policy, preference_loss(options, paired=False), data)
    assert data.mismatched is not None and data.rows.reference_sum is not None
    baseline = by_hand(policy.table, data.mismatched, list(range(ROWS)))
    assert found["kl"] == pytest.approx(baseline, rel=1e-6)
    total = 0.0
    for row, good in enumerate([True, False, False, True, True, False]):
        logp = policy.table[row][: int(data.rows.lengths[row]) - 1].double().sum()
        gap = logp - data.rows.reference_sum[row] - baseline
        total += float(torch.sigmoid(-0.5 * gap) * 2 if good else torch.sigmoid(0.5 * gap))
    assert found["loss"] == pytest.approx(total / ROWS, rel=1e-6)
    assert not policy.steps
