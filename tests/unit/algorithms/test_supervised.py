import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.aggregation import AGGREGATIONS, token_mean
from rftmega.algorithms.supervised import cost_loss, cross_entropy_loss, last_value, pairwise_loss
from rftmega.core.types import Experience, Rows, TokenLoss, TokenStats, TokenValues
from rftmega.trainer.experience import given

LENGTHS, PROMPTS = [6, 3, 4, 7, 2, 2], [2, 2, 3, 3, 1, 1]


def rows(lengths: list[int] = LENGTHS, prompts: list[int] = PROMPTS, *, padding: int = 0) -> Rows:
    return Rows.of_completions(
        torch.zeros(len(lengths), max(lengths) + padding, dtype=torch.int64),
        torch.tensor(prompts),
        torch.tensor(lengths),
    )


def reduced(loss: TokenLoss) -> Tensor:
    return (loss.value * loss.weight).sum() / loss.count


def numbers(like: Rows, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(like.mask.shape, dtype=torch.float64).requires_grad_()


def cross_entropy_by_hand(logp: Tensor, aggregation: str) -> tuple[float, Tensor]:
    """Value and gradient, token by token."""
    gradient = torch.zeros_like(logp)
    total = 0.0
    things = (
        sum(n - p for n, p in zip(LENGTHS, PROMPTS, strict=True))
        if aggregation == "token_mean"
        else len(LENGTHS)
    )
    for b, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        for place in range(prompt, length):  # of the token that is predicted
            share = 1.0 / (length - prompt) if aggregation == "sequence_mean" else 1.0
            total -= share * float(logp[b, place - 1])
            gradient[b, place - 1] = -share / things
    return total / things, gradient


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("seed", range(3))
def test_cross_entropy_is_its_formula(aggregation: str, seed: int) -> None:
    logp = numbers(rows(), seed)
    found = reduced(
        cross_entropy_loss(AGGREGATIONS[aggregation])(TokenStats(logp, None), given(rows()))
    )
    found.backward()
    value, gradient = cross_entropy_by_hand(logp.detach(), aggregation)
    assert found.item() == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(logp.grad, gradient, atol=1e-6, rtol=1e-6)


def pairwise_by_hand(values: Tensor) -> tuple[float, Tensor]:
    """Of rows whose lengths are LENGTHS without the place behind the end."""
    gradient = torch.zeros_like(values)
    total, pairs = 0.0, len(LENGTHS) // 2
    for pair in range(pairs):
        better, worse = 2 * pair, 2 * pair + 1
        a, b = LENGTHS[better] - 1, LENGTHS[worse] - 1  # the state after the last token
        p = 1 / (1 + math.exp(float(values[worse, b]) - float(values[better, a])))
        total -= math.log(p)
        gradient[better, a] = -(1 - p) / pairs
        gradient[worse, b] = (1 - p) / pairs
    return total / pairs, gradient


@pytest.mark.parametrize("seed", range(3))
def test_the_pairwise_loss_is_its_formula(seed: int) -> None:
    ended = rows().with_end()
    values = numbers(ended, seed)
    loss = pairwise_loss()(TokenValues(values), given(ended))
    reduced(loss).backward()
    value, gradient = pairwise_by_hand(values.detach())
    assert reduced(loss).item() == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(values.grad, gradient, atol=1e-6, rtol=1e-6)
    assert int(loss.count) == 3
    assert not any(metric.value.requires_grad for metric in loss.metrics.values())
    mean = {name: ((m.value * m.weight).sum() / m.count).item() for name, m in loss.metrics.items()}
    last = [float(values[b, n - 1].detach()) for b, n in enumerate(LENGTHS)]
    assert mean["chosen_reward"] == pytest.approx(sum(last[::2]) / 3)
    assert mean["rejected_reward"] == pytest.approx(sum(last[1::2]) / 3)
    assert mean["margin"] == pytest.approx(sum(last[::2]) / 3 - sum(last[1::2]) / 3)
    assert mean["accuracy"] == pytest.approx(
        sum(a > b for a, b in zip(last[::2], last[1::2], strict=True)) / 3
    )


UNSAFE = [False, True, False, False, True, True]


def cost_by_hand(values: Tensor) -> tuple[float, Tensor]:
    """The cost model's loss of Safe RLHF, and its gradient, response by response."""
    gradient = torch.zeros_like(values)
    total, pairs = 0.0, len(LENGTHS) // 2
    for pair in range(pairs):
        ends = {row: LENGTHS[row] - 1 for row in (2 * pair, 2 * pair + 1)}
        (safer, a), (worse, b) = ends.items()
        harm = 1 / (1 + math.exp(float(values[safer, a]) - float(values[worse, b])))
        total -= math.log(harm)
        gradient[safer, a] += (1 - harm) / pairs
        gradient[worse, b] -= (1 - harm) / pairs
        for row, end in ends.items():
            sign = 1 if UNSAFE[row] else -1
            right = 1 / (1 + math.exp(-sign * float(values[row, end])))
            total -= math.log(right)
            gradient[row, end] -= sign * (1 - right) / pairs
    return total / pairs, gradient


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_a_cost_model_is_its_formula(seed: int) -> None:
    ended = replace(rows(), unsafe=torch.tensor(UNSAFE)).with_end()
    values = numbers(ended, seed)
    loss = cost_loss()(TokenValues(values), given(ended))
    reduced(loss).backward()
    value, gradient = cost_by_hand(values.detach())
    assert reduced(loss).item() == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(values.grad, gradient, atol=1e-6, rtol=1e-6)
    mean = {name: ((m.value * m.weight).sum() / m.count).item() for name, m in loss.metrics.items()}
    last = [float(values[b, n - 1].detach()) for b, n in enumerate(LENGTHS)]
    right = [(score > 0) == unsafe for score, unsafe in zip(last, UNSAFE, strict=True)]
    assert mean["safety_accuracy"] == pytest.approx(sum(right) / 6)
    harmful = [worse > safer for safer, worse in zip(last[::2], last[1::2], strict=True)]
    assert mean["accuracy"] == pytest.approx(sum(harmful) / 3)
    assert mean["margin"] == pytest.approx((sum(last[1::2]) - sum(last[::2])) / 3)
    assert mean["chosen_cost"] == pytest.approx(sum(last[::2]) / 3)


def test_safety_labels_follow_their_rows_into_micro_batches() -> None:
    ended = replace(rows(), unsafe=torch.tensor(UNSAFE)).with_end()
    whole, values = given(ended), numbers(ended, 0)
    parts = [whole.select(torch.tensor(rows)) for rows in ([4, 5], [0, 1, 2, 3])]
    losses = [
        cost_loss()(TokenValues(values[rows][:, : part.mask.shape[1]]), part)
        for rows, part in zip(([4, 5], [0, 1, 2, 3]), parts, strict=True)
    ]
    total = sum((loss.value * loss.weight).sum() for loss in losses)
    expected = cost_by_hand(values.detach())[0]
    assert float(total) / 3 == pytest.approx(expected, rel=1e-6)


def test_pairs_may_come_in_any_order_and_in_any_micro_batch() -> None:
    ended = rows().with_end()
    loss_fn = pairwise_loss()

    def gradient(parts: list[list[int]]) -> Tensor:
        values = numbers(ended, 0)
        losses = []
        for part in parts:
            index = torch.tensor(part)
            some = given(ended).select(index)
            losses.append(loss_fn(TokenValues(values[index][:, : some.mask.shape[1]]), some))
        (
            sum((loss.value * loss.weight).sum() for loss in losses)
            / sum(loss.count for loss in losses)
        ).backward()
        return values.grad

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    for parts in ([[4, 5, 0, 1, 2, 3]], [[2, 3], [4, 5, 0, 1]], [[0, 1], [2, 3], [4, 5]]):
        torch.testing.assert_close(gradient(parts), whole)


def test_the_worse_answer_first_turns_the_loss_round() -> None:
    ended = rows().with_end()
    values, swapped = numbers(ended, 0), torch.tensor([1, 0, 3, 2, 5, 4])
    loss = pairwise_loss()(TokenValues(values), given(ended))
    turned = pairwise_loss()(TokenValues(values[swapped]), given(ended).select(swapped))
    shown = loss.metrics["margin"]
    margin = (shown.value * shown.weight).sum() / shown.count
    # softplus(m) - softplus(-m) = m
    assert (reduced(turned) - reduced(loss)).item() == pytest.approx(margin.item())
    accuracy = (
        sum(
            (m.value * m.weight).sum().item()
            for m in (x.metrics["accuracy"] for x in (loss, turned))
        )
        / 3
    )
    assert accuracy == pytest.approx(1.0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e30])
def test_padding_and_its_content_change_nothing(poison: float) -> None:
    for loss_fn, stats, ended in (
        (pairwise_loss(), lambda x: TokenValues(x), True),
        (cross_entropy_loss(), lambda x: TokenStats(x, x), False),
    ):
        tight, wide = rows(), rows(padding=3)
        if ended:
            tight, wide = tight.with_end(), wide.with_end()
        clean = numbers(tight, 0)
        read = torch.zeros(wide.mask.shape, dtype=torch.bool)
        read[:, : tight.mask.shape[1]] = (
            torch.arange(tight.mask.shape[1]) < tight.lengths[:, None] - 1
        )
        dirty = torch.full(wide.mask.shape, poison, dtype=torch.float64)
        dirty[:, : tight.mask.shape[1]] = clean.detach()
        dirty = dirty.masked_fill(~read, poison).requires_grad_()
        a, b = (
            reduced(loss_fn(stats(clean), given(tight))),
            reduced(loss_fn(stats(dirty), given(wide))),
        )
        a.backward()
        b.backward()
        assert a.item() == pytest.approx(b.item(), rel=1e-12)  # sums of another width
        assert torch.equal(dirty.grad[:, : clean.shape[1]], clean.grad)
        assert not dirty.grad[:, clean.shape[1] :].any()


@pytest.mark.parametrize("margin", [1e4, -1e4, 0.0])
def test_extreme_margins_have_finite_losses_and_gradients(margin: float) -> None:
    ended = rows([2, 2], [1, 1]).with_end()
    values = torch.tensor([[0.0, margin], [0.0, 0.0]], requires_grad=True)
    loss = reduced(pairwise_loss()(TokenValues(values), given(ended)))
    loss.backward()
    assert loss.item() == pytest.approx(max(-margin, 0.0) if margin else math.log(2))
    assert values.grad.isfinite().all()


def test_a_batch_of_no_rows_has_count_zero_a_graph_and_the_same_metrics() -> None:
    for loss_fn, stats in (
        (cross_entropy_loss(), lambda x: TokenStats(x, x)),
        (pairwise_loss(), lambda x: TokenValues(x)),
    ):
        whole = given(rows().with_end())
        nothing = whole.select(torch.zeros(0, dtype=torch.int64))
        values = torch.zeros(nothing.mask.shape, requires_grad=True)
        loss = loss_fn(stats(values), nothing)
        total = (loss.value * loss.weight).sum()
        total.backward()
        assert (int(loss.count), total.item()) == (0, 0.0)
        assert (
            loss.metrics.keys()
            == loss_fn(stats(torch.zeros(whole.mask.shape)), whole).metrics.keys()
        )
        assert all(metric.value.shape == nothing.mask.shape for metric in loss.metrics.values())


def test_a_pair_that_was_split_is_noticed() -> None:
    part = given(rows().with_end()).select(torch.tensor([0]))
    with pytest.raises(AssertionError, match="no pairs"):
        pairwise_loss()(TokenValues(torch.zeros(part.mask.shape)), part)


def test_the_last_value_is_the_one_after_the_last_token() -> None:
    """A model whose value of a state is the number of its tokens."""
    ended = rows().with_end()
    counted = torch.arange(1, ended.mask.shape[1] + 1).expand(ended.mask.shape)
    assert last_value(counted, ended).tolist() == LENGTHS


def test_given_rows_keep_their_mask() -> None:
    experience: Experience = given(rows())
    assert torch.equal(experience.mask, rows().mask)
    assert token_mean(experience.mask)[1] == sum(
        n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)
    )
    assert replace(experience, reference_logp=None) == experience
