"""Each member of the family against its formula, written as a double loop over answers and tokens
in float64.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftmega.algorithms.aggregation import aggregation_of
from rftmega.algorithms.losses import highest, policy_loss
from rftmega.algorithms.mismatch import importance
from rftmega.algorithms.surrogates import clip_binds
from rftmega.config.options.algorithms import (
    CISPO,
    CPGD,
    DPPO,
    GMPO,
    GSPO,
    IPO,
    SAPO,
    Clip,
    IcePop,
    MaskedImportance,
    NoImportance,
    ScoreFunction,
    SequenceImportance,
    TokenImportance,
)
from rftmega.config.options.parts import IMPLEMENTATIONS, PolicyLoss
from rftmega.core.types import Experience, TokenMetric, TokenStats

# logp, old logp, advantage, the engine's logp of an answer's tokens
Row = tuple[list[Tensor], list[float], list[float], list[float]]
LOW, HIGH, DUAL, DRIFT, DRIFT_CLIP = 0.2, 0.28, 3.0, 0.3, 0.2
LOSSES: dict[str, Any] = {
    "clip": Clip(low=LOW, high=HIGH, dual=DUAL),
    "gspo": GSPO(low=LOW, high=HIGH),
    "cispo": CISPO(low=LOW, high=HIGH),
    "cpgd": CPGD(low=LOW, high=HIGH, drift_coef=DRIFT, drift_clip=DRIFT_CLIP),
    "reinforce": ScoreFunction(),
    "sapo": SAPO(tau_positive=0.9, tau_negative=1.3),
    "gmpo": GMPO(low=LOW, high=HIGH),
    "dppo": DPPO(low=0.1, high=0.15, drift_coef=DRIFT),
    "ipo": IPO(threshold=0.12, drift_coef=DRIFT),
}


def clipping(name: str, low: float = 0.2, high: float = 0.2) -> PolicyLoss:
    """The loss of this name with a clip range and nothing else."""
    made: PolicyLoss = type(LOSSES[name])(low=low, high=high)
    return made


def per_token(options: PolicyLoss, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = IMPLEMENTATIONS[type(options)](log_ratio, advantage, mask, options)
    return found


def between(x: Tensor, low: float, high: float) -> Tensor:
    value = float(x.detach())
    return (
        x if low <= value <= high else torch.tensor(min(max(value, low), high), dtype=torch.float64)
    )


def smaller(a: Tensor, b: Tensor) -> Tensor:
    return a if float(a.detach()) <= float(b.detach()) else b


def pessimistic(ratio: Tensor, a: float) -> Tensor:
    value = smaller(ratio * a, between(ratio, 1 - LOW, 1 + HIGH) * a)
    return -value


def clip(row: Row, t: int) -> Tensor:
    logp, old, advantage, _ = row
    loss = pessimistic(torch.exp(logp[t] - old[t]), advantage[t])
    if advantage[t] < 0 and float(loss.detach()) > -DUAL * advantage[t]:
        return torch.tensor(-DUAL * advantage[t], dtype=torch.float64)
    return loss


def gspo(row: Row, t: int) -> Tensor:
    logp, old, advantage, _ = row
    mean = sum(
        (x - y for x, y in zip(logp, old, strict=True)), torch.zeros((), dtype=torch.float64)
    ) / len(logp)
    return pessimistic(torch.exp(mean), advantage[t])


def cispo(row: Row, t: int) -> Tensor:
    logp, old, advantage, _ = row
    weight = min(max(math.exp(float(logp[t].detach()) - old[t]), 1 - LOW), 1 + HIGH)
    return -weight * advantage[t] * (logp[t] - old[t])


def cpgd(row: Row, t: int) -> Tensor:
    logp, old, advantage, _ = row
    x, a = logp[t] - old[t], advantage[t]
    clipped = between(x, math.log(1 - LOW), math.log(1 + HIGH))
    return -smaller(x * a, clipped * a) + DRIFT * drift(x)


def drift(x: Tensor) -> Tensor:
    """A value whose gradient is the authors' min(ratio - 1, their clip)."""
    edge = math.log(1 + DRIFT_CLIP)
    if float(x.detach()) <= edge:
        return torch.exp(x) - 1 - x
    return DRIFT_CLIP - edge + DRIFT_CLIP * (x - edge)


def reinforce(row: Row, t: int) -> Tensor:
    logp, old, advantage, _ = row
    return -advantage[t] * (logp[t] - old[t])


def sapo(row: Row, t: int) -> Tensor:
    logp, old, advantage, _ = row
    tau = 0.9 if advantage[t] > 0 else 1.3
    gate = 1 / (1 + torch.exp(-tau * (torch.exp(logp[t] - old[t]) - 1)))
    return -advantage[t] * 4 / tau * gate


def gmpo(row: Row, t: int) -> Tensor:
    """In the paper's form: min(w^s, clip(w^s))^s with s the sign of the advantage."""
    logp, old, advantage, _ = row
    product = torch.ones((), dtype=torch.float64)
    sign = 1 if advantage[t] > 0 else -1
    for x, y in zip(logp, old, strict=True):
        ratio = torch.exp(x - y) ** sign
        edges = (-LOW, HIGH) if sign > 0 else (-HIGH, LOW)
        product = product * smaller(ratio, between(ratio, *map(math.exp, edges))) ** sign
    return -advantage[t] * product ** (1 / len(logp))


def dppo(row: Row, t: int) -> Tensor:
    logp, old, advantage, sampling = row
    moved = math.exp(float(logp[t].detach())) - math.exp(sampling[t])
    left = moved > 0.15 if advantage[t] > 0 else moved < -0.1
    drift = DRIFT * (logp[t] - sampling[t]) ** 2
    return drift if left else drift - torch.exp(logp[t] - old[t]) * advantage[t]


def ipo(row: Row, t: int) -> Tensor:
    logp, old, advantage, sampling = row
    left = abs(math.exp(float(logp[t].detach())) - math.exp(sampling[t])) > 0.12
    drift = DRIFT * (logp[t] - sampling[t]) ** 2
    return drift if left else drift - torch.exp(logp[t] - old[t]) * advantage[t]


BY_HAND: dict[str, Callable[[Row, int], Tensor]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "cpgd": cpgd,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "ipo": ipo,
}
LONGEST = 7


def ragged(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Experience, Tensor]:
    torch.manual_seed(seed)
    lengths = torch.tensor([LONGEST, 3, 1, 5])
    old = -torch.rand(4, LONGEST, dtype=dtype)
    mask = torch.arange(LONGEST) < lengths[:, None]
    advantage = torch.randn(4, 1, dtype=dtype).expand(4, LONGEST) * mask
    experience = Experience(
        tokens=torch.zeros(4, LONGEST + 1, dtype=torch.int64), prompt_lengths=torch.ones(4, dtype=torch.int64),
        lengths=lengths + 1, mask=mask, behaviour_logp=old + 0.3 * torch.randn_like(old), old_logp=old, reference_logp=None,
        advantage=advantage,
    )  # fmt: skip
    return experience, (old + 0.5 * torch.randn_like(old)).detach().requires_grad_()


def reduced(experience: Experience, logp: Tensor, **options: Any) -> Tensor:
    loss = policy_loss(**options)(TokenStats(logp, None), experience)
    return (loss.value * loss.weight).sum() / loss.count


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean", "sequence_sum", "sequence_total"]
)
def test_value_and_gradient_are_the_formulas(name: str, aggregation: str) -> None:
    for seed in range(4):
        experience, logp = ragged(seed)
        found = reduced(
            experience,
            logp,
            options=LOSSES[name],
            aggregation=aggregation_of(aggregation, longest=LONGEST),
        )
        (gradient,) = torch.autograd.grad(found, logp)
        free = logp.detach().clone().requires_grad_()
        total, things = torch.zeros((), dtype=torch.float64), 0
        for b, length in enumerate((experience.lengths - 1).tolist()):
            row = (
                list(free[b, :length]),
                experience.old_logp[b, :length].tolist(),
                experience.advantage[b, :length].tolist(),
                experience.behaviour_logp[b, :length].tolist(),
            )
            weight = {"sequence_mean": 1 / length, "sequence_sum": 1 / LONGEST}.get(
                aggregation, 1.0
            )
            things += length if aggregation == "token_mean" else 1
            total = total + weight * sum(
                (BY_HAND[name](row, t) for t in range(length)), torch.zeros((), dtype=torch.float64)
            )
        (wanted,) = torch.autograd.grad(total / things, free)
        assert found.item() == pytest.approx((total / things).item(), rel=1e-6)
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", list(LOSSES))
def test_before_anything_has_changed_all_of_them_have_the_same_gradient(name: str) -> None:
    experience, _ = ragged(0)
    logp = experience.old_logp.clone().requires_grad_()
    experience = replace(experience, behaviour_logp=experience.old_logp)
    aggregation = aggregation_of("sequence_mean", longest=LONGEST)
    (gradient,) = torch.autograd.grad(
        reduced(experience, logp, options=LOSSES[name], aggregation=aggregation), logp
    )
    wanted = -experience.advantage * experience.mask / (experience.lengths - 1)[:, None] / 4
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 100.0, -100.0])
def test_what_stands_in_padding_changes_neither_loss_nor_gradient(name: str, poison: float) -> None:
    experience, logp = ragged(1)
    found = []
    for filling in (0.0, poison):

        def fill(x: Tensor, filling: float = filling) -> Tensor:
            return torch.where(experience.mask, x.detach(), filling)

        dirty = replace(
            experience, advantage=fill(experience.advantage), old_logp=fill(experience.old_logp),
            behaviour_logp=fill(experience.behaviour_logp),
        )  # fmt: skip
        x = fill(logp).requires_grad_()
        loss = reduced(dirty, x, options=LOSSES[name], correction=SequenceImportance(cap=2.0))
        found.append((loss.item(), torch.autograd.grad(loss, x)[0]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("log_ratio", [94.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_have_finite_values_and_gradients(
    name: str, log_ratio: float, advantage: float
) -> None:
    experience, _ = ragged(0, torch.float32)
    sign = experience.mask * advantage
    logp = (experience.old_logp + log_ratio).requires_grad_()
    loss = reduced(replace(experience, advantage=sign), logp, options=LOSSES[name])
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logp)[0].isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(LOSSES)),
    order=st.permutations(range(4)),
    padding=st.integers(0, 3),
    cut=st.integers(1, 3),
)
def test_row_order_padding_and_micro_batches_do_not_matter(
    name: str, order: list[int], padding: int, cut: int
) -> None:
    experience, logp = ragged(2)
    options = {"options": LOSSES[name], "correction": TokenImportance(cap=1.5)}
    whole = reduced(experience, logp, **options)
    wanted = torch.autograd.grad(whole, logp)[0]

    def wider(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, padding)) if x.dim() == 2 else x

    padded = experience.changed(wider)
    x = wider(logp.detach()).requires_grad_()
    losses = []
    for rows in (torch.tensor(order[:cut]), torch.tensor(order[cut:])):
        part = padded.select(rows)
        losses.append(
            policy_loss(**options)(TokenStats(x[rows][:, : part.mask.shape[1]], None), part)
        )
    found = sum((loss.value * loss.weight).sum() for loss in losses) / sum(
        loss.count for loss in losses
    )
    assert found.item() == pytest.approx(whole.item(), rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(found, x)[0][:, :LONGEST], wanted)


def test_a_dual_clip_bounds_the_loss_of_bad_answers_alone() -> None:
    far = torch.tensor([[math.log(50.0)]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.bool)
    dual = Clip(low=0.2, high=0.2, dual=3.0)
    assert per_token(dual, far, torch.tensor([[-2.0]]), one).item() == pytest.approx(6.0)
    assert per_token(Clip(), far, torch.tensor([[-2.0]]), one).item() == pytest.approx(100.0)
    assert per_token(dual, far, torch.tensor([[2.0]]), one).item() == pytest.approx(-2.4)


def test_importance_weights_are_bounded_and_carry_no_gradient() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    old = torch.zeros(2, 3, requires_grad=True)
    behaviour = -torch.tensor(
        [[math.log(4.0), math.log(0.5), 9.0], [0.0, math.log(1.5), math.log(1.2)]]
    )
    kinds = (
        NoImportance(),
        TokenImportance(cap=2.0),
        SequenceImportance(cap=2.0),
        MaskedImportance(cap=2.0),
        IcePop(low=0.6, high=3.0),
    )
    weights = {kind.type: importance(old, behaviour, mask, kind) for kind in kinds}
    assert not any(weight.requires_grad for weight in weights.values())
    torch.testing.assert_close(weights["none"], torch.ones(2, 3))
    torch.testing.assert_close(weights["token"], torch.tensor([[2.0, 0.5, 1.0], [1.0, 1.5, 1.2]]))
    torch.testing.assert_close(weights["sequence"], torch.tensor([[2.0] * 3, [1.8] * 3]))
    torch.testing.assert_close(weights["mask"], torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(weights["icepop"], torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.5, 1.2]]))


def test_tokens_of_high_entropy_are_kept_at_least_one_an_answer_never_padding() -> None:
    entropy = torch.tensor([[0.1, 0.9, 0.9, 0.2, 5.0], [0.3, 9.0, 9.0, 9.0, 9.0], [9.0] * 5])
    mask = torch.tensor([[True] * 4 + [False], [True] + [False] * 4, [False] * 5])
    assert highest(entropy, mask, 0.5).int().tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0] * 5]
    assert highest(entropy, mask, 0.2).int().tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0] * 5]
    experience, logp = ragged(0)
    loss = policy_loss(high_entropy_share=0.4)(TokenStats(logp, torch.rand_like(logp)), experience)
    assert int(loss.count) == sum(max(1, int(0.4 * n)) for n in (experience.lengths - 1).tolist())


def gradient_at(options: PolicyLoss, log_ratio: float, advantage: float) -> tuple[float, float]:
    """(value, gradient) of one token."""
    x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    value = per_token(
        options,
        x,
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
    )
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return value.item(), gradient.item()


@pytest.mark.parametrize("name", ["clip", "gspo", "cpgd"])
def test_just_beyond_the_clip_nothing_is_trained_and_clip_higher_moves_the_upper_edge_alone(
    name: str,
) -> None:
    for advantage, low, high in (
        (1.0, 0.2, 0.2),
        (-1.0, 0.2, 0.2),
        (1.0, 0.2, 0.28),
        (-1.0, 0.2, 0.28),
    ):
        options, edge = (
            clipping(name, low, high),
            math.log(1 + high) if advantage > 0 else math.log(1 - low),
        )
        beyond, within = edge + 1e-6 * advantage, edge - 1e-6 * advantage
        assert gradient_at(options, beyond, advantage)[1] == 0.0
        scale = 1.0 if name == "cpgd" else math.exp(within)
        assert gradient_at(options, within, advantage)[1] == pytest.approx(-advantage * scale)
        assert gradient_at(options, -beyond, advantage)[1] != 0.0, (
            "on the other side it always learns"
        )
    assert gradient_at(clipping(name, 0.2, 0.28), math.log(1.25), 1.0)[1] != 0.0
    assert gradient_at(clipping(name, 0.2, 0.2), math.log(1.25), 1.0)[1] == 0.0


def test_the_drift_of_cpgd_is_never_negative_and_pulls_back() -> None:
    for x in (-2.0, -0.1, 0.1, 2.0):
        value, gradient = gradient_at(CPGD(drift_coef=1.0), x, 0.0)
        assert value > 0
        assert math.copysign(1.0, gradient) == math.copysign(1.0, x)
    assert gradient_at(CPGD(drift_coef=1.0), 0.0, 0.0) == (0.0, 0.0)


@pytest.mark.parametrize("log_ratio", [math.log(1.2), 0.5, 15.0, 21.0, 94.0])
def test_the_drift_of_cpgd_pulls_no_harder_than_its_clip_however_far_a_token_has_gone(
    log_ratio: float,
) -> None:
    options = CPGD(drift_coef=0.01, drift_clip=0.2)
    value, gradient = gradient_at(options, log_ratio, 0.0)
    assert gradient == pytest.approx(0.01 * 0.2)
    assert value > 0
    assert gradient_at(options, 0.1, 0.0)[1] == pytest.approx(0.01 * (math.exp(0.1) - 1))
    assert gradient_at(options, -5.0, 0.0)[1] == pytest.approx(0.01 * (math.exp(-5.0) - 1))


@pytest.mark.parametrize("name", ["clip", "gspo"])
@pytest.mark.parametrize("log_ratio", [19.9, 20.1, 25.0, 94.0])
def test_a_bad_token_that_became_far_likelier_is_unlearnt_all_the_same(
    name: str, log_ratio: float
) -> None:
    """Without a dual clip nothing bounds the loss of a negative advantage, so its gradient must not
    vanish.
    """
    _, gradient = gradient_at(clipping(name), log_ratio, -1.0)
    assert math.exp(19.8) < gradient < math.inf


def test_clip_fraction_counts_where_the_clip_cuts_the_gradient_off() -> None:
    """Against autograd: a token with an advantage whose surrogate has no gradient is a clipped one."""
    torch.manual_seed(3)
    mask = torch.ones(40, 6, dtype=torch.bool)
    advantage = torch.randn(40, 1, dtype=torch.float64).expand(40, 6).contiguous()
    for options in (
        *(clipping(name, 0.2, 0.28) for name in ("clip", "gspo", "cpgd")),
        Clip(low=0.2, high=0.28, dual=1.5),
    ):
        for _ in range(2):
            x = (0.5 * torch.randn(40, 6, dtype=torch.float64)).requires_grad_()
            (gradient,) = torch.autograd.grad(per_token(options, x, advantage, mask).sum(), x)
            binds = clip_binds(options, x.detach(), advantage, mask)
            assert binds is not None
            assert torch.equal(binds, gradient == 0)
            assert 0.05 < binds.double().mean() < 0.95
    assert clip_binds(ScoreFunction(), x, advantage, mask) is None
    assert clip_binds(SAPO(), x, advantage, mask) is None
    whole = GMPO(low=0.2, high=0.28)
    (gradient,) = torch.autograd.grad(per_token(whole, x, advantage, mask).sum(), x)
    assert torch.equal(clip_binds(whole, x.detach(), advantage, mask), gradient == 0)
    ratio = torch.tensor([[0.7, 0.9, 1.2, 1.3]]).log()
    for sign in (1.0, -1.0):
        found = clip_binds(CISPO(low=0.2, high=0.28), ratio, sign * torch.ones(1, 4), mask[:1, :4])
        assert found.tolist() == [[True, False, False, True]], (
            "its weight is bounded, whatever the advantage"
        )


def mean_of(metric: TokenMetric) -> float:
    return float((metric.value * metric.weight).sum() / metric.count)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean", "sequence_sum", "sequence_total"]
)
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_metrics_are_means_over_all_response_tokens_however_the_loss_is_scaled(
    aggregation: str, share: float
) -> None:
    experience, logp = ragged(5)
    experience = replace(experience, reference_logp=experience.old_logp - 0.2)
    entropy = torch.rand_like(logp)
    loss_fn = policy_loss(
        aggregation=aggregation_of(aggregation, longest=1000),
        options=Clip(low=0.2, high=0.28),
        high_entropy_share=share,
    )
    shown = loss_fn(TokenStats(logp, entropy), experience).metrics
    lengths = (experience.lengths - 1).tolist()
    tokens = [(b, t) for b, length in enumerate(lengths) for t in range(length)]
    moved = {at: float(logp[at].detach()) - float(experience.old_logp[at]) for at in tokens}
    wanted = {
        "ratio": [math.exp(x) for x in moved.values()],
        "ppo_kl": [-x for x in moved.values()],
        "importance": [1.0] * len(tokens),
        "entropy": [float(entropy[at]) for at in tokens],
        "kl": [math.exp(-d) - 1 + d for d in (moved[at] + 0.2 for at in tokens)],
    }
    for name, values in wanted.items():
        assert mean_of(shown[name]) == pytest.approx(sum(values) / len(values)), name
    if share == 1.0:
        bad = [x for at, x in moved.items() if x * float(experience.advantage[at]) > 0]
        clipped = [x for x in bad if not 0.8 <= math.exp(x) <= 1.28]
        assert mean_of(shown["clip_fraction"]) == pytest.approx(len(clipped) / len(tokens))


@pytest.mark.parametrize("name", ["dppo", "ipo"])
def test_clip_fraction_of_a_trust_region_counts_the_tokens_that_lost_their_advantage(
    name: str,
) -> None:
    experience, logp = ragged(5)
    options = replace(LOSSES[name], drift_coef=0.0)
    shown = policy_loss(options=options)(TokenStats(logp, None), experience)
    (gradient,) = torch.autograd.grad(shown.value.sum(), logp)
    dropped = (gradient == 0)[experience.mask].double().mean()
    assert 0.1 < dropped < 0.9
    assert mean_of(shown.metrics["clip_fraction"]) == pytest.approx(float(dropped))


def test_the_gate_of_sapo_fades_where_a_clip_would_cut() -> None:
    for advantage, tau in ((2.0, 1.0), (-2.0, 1.05)):
        slopes = [gradient_at(SAPO(), math.log(r), advantage)[1] / r for r in (0.2, 0.7, 1, 2, 6)]
        sizes = [abs(slope) for slope in slopes]
        assert sizes[2] == pytest.approx(2.0)
        assert sizes[0] < sizes[1] < sizes[2] > sizes[3] > sizes[4] > 0
        gate = 1 / (1 + math.exp(-tau))  # at a ratio of 2
        assert sizes[3] == pytest.approx(2.0 * 4 * gate * (1 - gate))


def test_clip_fraction_of_gspo_is_a_share_of_answers_and_reinforce_has_none() -> None:
    experience, _ = ragged(5)
    moved = torch.tensor([[0.5], [0.0], [0.5], [0.5]], dtype=torch.float64)
    logp = experience.old_logp + moved
    up = replace(experience, advantage=experience.mask.double())
    shown = policy_loss(options=GSPO())(TokenStats(logp, None), up).metrics
    assert mean_of(shown["clip_fraction"]) == pytest.approx(3 / 4)
    assert (
        "clip_fraction"
        not in policy_loss(options=ScoreFunction())(TokenStats(logp, None), up).metrics
    )


def test_a_sequence_ratio_is_normalised_by_length_and_clips_all_tokens_together() -> None:
    """Log-ratios that add up to 4 x 3e-4 x 1.01: just beyond 1 + 3e-4, for every token, however
    they are spread.
    """
    mask, options = torch.ones(1, 4, dtype=torch.bool), GSPO(low=2e-4, high=3e-4)
    for spread in ([1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0], [9.0, -5.0, 3.0, -3.0]):
        for size, learns in ((1.01, False), (0.99, True)):
            x = (
                torch.tensor([spread], dtype=torch.float64) * math.log1p(3e-4) * size
            ).requires_grad_()
            (gradient,) = torch.autograd.grad(
                per_token(options, x, torch.ones(1, 4), mask).sum(), x
            )
            assert bool(gradient.any()) is learns


def test_with_a_cap_of_one_no_importance_weight_is_above_one() -> None:
    torch.manual_seed(0)
    mask = torch.rand(5, 7) < 0.8
    old, behaviour = torch.randn(5, 7), torch.randn(5, 7)
    for kind in (TokenImportance(cap=1.0), SequenceImportance(cap=1.0)):
        weight = importance(old, behaviour, mask, kind)
        assert (weight <= 1).all()
        assert (weight < 1).any()
