"""Causes of a gap that the real path does not show by itself: cut-off distributions, experts'
routes, rounding.
"""

from dataclasses import replace

import pytest
import torch

from rftmega.algorithms.mismatch import log_prob_gap
from rftmega.core.types import SliceChecksums
from rftmega.trainer.logprob_mismatch.causes import (
    Evidence,
    Limits,
    cause_of,
    worst_rows,
    worst_tokens,
)
from tests.columns import ragged

LIMITS = Limits(1e-3, 1e-4)
MASK = torch.ones(4, 50, dtype=torch.bool)
MASK[:, :5] = False


def evidence(gap: torch.Tensor, *, has_experts: bool = False) -> Evidence:
    """Of an engine whose log-probabilities are the trainer's plus `gap` [4, 50]."""
    torch.manual_seed(0)
    trainer = -torch.rand(4, 50, dtype=torch.float64) - 0.5
    engine = trainer + gap
    return Evidence(
        whole=log_prob_gap(engine, trainer, MASK),
        share_beyond=float((gap[MASK].abs() > LIMITS.percentile).double().mean()),
        mask=MASK,
        behaviour_logp=engine,
        old_logp=trainer,
        untempered_logp=None,
        other_prompt=torch.full((4,), -1),
        after_push=None,
        checksums=[],
        has_experts=has_experts,
    )


def one_in(n: int, size: float) -> torch.Tensor:
    """Every n-th token is off by this much, up and down by turns."""
    gap = torch.zeros(4 * 50, dtype=torch.float64)
    gap[::n] = size
    gap[:: 2 * n] = -size
    return gap.view(4, 50)


def test_a_few_tokens_that_are_off_in_a_model_with_experts_are_routes_and_in_another_numbers() -> (
    None
):
    assert cause_of(evidence(one_in(40, 0.5), has_experts=True), LIMITS).kind == "experts' routes"
    assert cause_of(evidence(one_in(40, 0.5)), LIMITS).kind == "numbers"
    assert cause_of(evidence(one_in(3, 0.5), has_experts=True), LIMITS).kind == "numbers", (
        "ties are rare"
    )


def test_a_distribution_that_was_cut_off_is_nowhere_lower() -> None:
    cut = cause_of(evidence(one_in(2, 0.3).abs()), LIMITS)
    assert cut.kind == "sampling transform"
    assert "top-p" in cut.why
    assert cause_of(evidence(-one_in(2, 0.3).abs()), LIMITS).kind == "numbers"


def test_small_gaps_are_rounding_and_large_ones_are_not() -> None:
    assert "rounding" in cause_of(evidence(one_in(2, 5e-4)), LIMITS).why
    assert "computes something else" in cause_of(evidence(one_in(2, 0.5)), LIMITS).why


@pytest.mark.parametrize(
    ("sums", "how"),
    [
        ((1, 2, 2), "were sent with other values than the trainer has"),
        ((1, 1, 2), "arrived changed"),
        ((1, 1, None), "did not arrive"),
    ],
)
def test_a_slice_that_is_not_as_the_trainer_holds_it_comes_before_all_else(
    sums: tuple, how: str
) -> None:
    off = evidence(one_in(2, 0.5))
    slices = [
        SliceChecksums("a.weight", ((0, 8),), 0, 1, 5, 5, 5),
        SliceChecksums("b.weight", ((8, 16),), 0, 1, *sums),
    ]
    found = cause_of(
        replace(off, checksums=slices, other_prompt=torch.zeros(4, dtype=torch.int64)), LIMITS
    )
    assert found.kind == "weights"
    assert f"1 tensor(s) {how}: b.weight[8:16]" in found.why


def test_a_short_answer_that_looks_like_another_prompts_by_rounding_is_at_its_own_prompt() -> None:
    """The mean is above its limit here, but no token is off by more than rounding makes it."""
    found = replace(evidence(one_in(2, 5e-4)), other_prompt=torch.tensor([-1, 3, -1, -1]))
    assert "rounding" in cause_of(found, LIMITS).why
    off = replace(evidence(one_in(2, 0.5)), other_prompt=torch.tensor([-1, 3, -1, -1]))
    assert "completion 1 under the prompt of 3" in cause_of(off, LIMITS).why
    none = replace(off, behaviour_logp=off.behaviour_logp.masked_fill(off.mask, float("nan")))
    assert cause_of(none, LIMITS).kind == "tokens"


def test_another_push_mends_weights_that_had_changed_but_not_what_few_tokens_show() -> None:
    good = log_prob_gap(
        torch.zeros(1, 9), torch.full((1, 9), 1e-6), torch.ones(1, 9, dtype=torch.bool)
    )
    assert cause_of(replace(evidence(one_in(2, 0.5)), after_push=good), LIMITS).kind == "weights"
    assert cause_of(replace(evidence(one_in(60, 0.5)), after_push=good), LIMITS).kind == "numbers"


def test_the_gap_is_that_of_a_loop_and_what_is_no_number_is_infinite() -> None:
    torch.manual_seed(1)
    engine, trainer = torch.randn(40, 60), torch.randn(40, 60)
    mask = torch.rand(40, 60) < 0.7
    found = log_prob_gap(engine, trainer, mask)
    by_hand = sorted(
        abs(float(x) - float(y)) for x, y in zip(engine[mask], trainer[mask], strict=True)
    )
    assert found.tokens == len(by_hand)
    assert found.largest == pytest.approx(by_hand[-1])
    assert found.mean == pytest.approx(sum(by_hand) / len(by_hand))
    assert found.percentile in by_hand
    assert sum(x <= found.percentile for x in by_hand) / len(by_hand) >= 0.999
    assert sum(x < found.percentile for x in by_hand) / len(by_hand) < 0.999
    engine[mask.nonzero()[0, 0], mask.nonzero()[0, 1]] = torch.nan
    spoilt = log_prob_gap(engine, trainer, mask)
    assert spoilt.largest == float("inf")
    assert LIMITS.exceeded_by(spoilt)
    assert not LIMITS.exceeded_by(log_prob_gap(engine, engine, torch.zeros_like(mask)))


def test_the_worst_rows_come_first_by_their_mean_and_what_stands_outside_the_mask_counts_nothing() -> (
    None
):
    trainer = torch.zeros(3, 4)
    engine = torch.tensor([[9.0, 0.1, 0.1, 0.1], [0.0, 0.5, 0.0, 0.0], [9.0, torch.nan, 0.0, 0.0]])
    mask = torch.tensor(
        [[False, True, True, True], [False, True, True, False], [False, True, False, False]]
    )
    assert worst_rows(ragged(engine), ragged(trainer), ragged(mask), 2).tolist() == [2, 1]


def test_a_trainer_that_does_not_agree_with_itself_comes_before_all_else() -> None:
    off = evidence(one_in(2, 0.5))
    off = replace(off, after_push=log_prob_gap(off.old_logp, off.old_logp, MASK))
    assert cause_of(replace(off, rescored=(off.old_logp, off.old_logp)), LIMITS).kind == "weights"
    drawn = off.old_logp + one_in(3, 0.2)
    found = cause_of(replace(off, rescored=(off.old_logp, drawn)), LIMITS)
    assert found.kind == "chance"
    assert "each time, by up to 0.2" in found.why
    found = cause_of(replace(off, rescored=(drawn, drawn)), LIMITS)
    assert found.kind == "chance"
    assert "the pass that the update learns in" in found.why


def test_a_few_experts_that_are_tied_between_two_passes_are_not_chance() -> None:
    off = evidence(one_in(40, 0.5), has_experts=True)
    drawn = off.old_logp + one_in(40, 0.2)
    found = cause_of(replace(off, rescored=(off.old_logp, drawn)), LIMITS)
    assert found.kind == "experts' routes"
    without = replace(off, rescored=(off.old_logp, drawn), has_experts=False)
    assert cause_of(without, LIMITS).kind == "chance"


def test_a_trainer_whose_numbers_depend_on_the_batch_is_named_before_another_push_that_mends() -> (
    None
):
    """As where equal scores are chosen between: new completions may agree by chance."""
    off = evidence(one_in(2, 0.5))
    off = replace(off, after_push=log_prob_gap(off.old_logp, off.old_logp, MASK))
    same = replace(off, alone_logp=off.old_logp + one_in(2, 5e-5))  # rounding
    assert cause_of(same, LIMITS).kind == "weights"
    found = cause_of(replace(off, alone_logp=off.old_logp + one_in(3, 0.2)), LIMITS)
    assert found.kind == "batch"
    assert (
        "by up to 0.2, if their row is scored by itself and without the tokens behind them. So"
        in found.why
    )
    fine = LIMITS._replace(percentile=1e-9, mean=1e-9)
    assert cause_of(same, fine).kind == "weights", "rounding is no batch"


def test_tokens_of_a_row_by_itself_that_are_the_engines_explain_few_tokens_too() -> None:
    off = evidence(one_in(40, 0.5), has_experts=True)
    tied = replace(off, alone_logp=off.old_logp + one_in(40, 0.2))
    assert cause_of(tied, LIMITS).kind == "experts' routes"
    assert cause_of(replace(tied, has_experts=False), LIMITS).kind == "batch"
    found = cause_of(replace(off, alone_logp=off.behaviour_logp), LIMITS)
    assert found.kind == "batch"
    assert "without the tokens behind them, which are the engine's. So" in found.why
    none = replace(off, behaviour_logp=off.behaviour_logp.masked_fill(off.mask, torch.nan))
    assert cause_of(replace(none, alone_logp=none.old_logp), LIMITS).kind != "batch"


def test_the_token_with_the_largest_mismatch_is_one_of_the_mask() -> None:
    engine = torch.tensor([[9.0, 0.1, 0.3, 0.2], [0.0, 5.0, torch.nan, 0.0], [1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, True, True], [False, True, True, True], [False] * 4])
    assert worst_tokens(engine, torch.zeros(3, 4), mask).tolist() == [2, 2, 0]
