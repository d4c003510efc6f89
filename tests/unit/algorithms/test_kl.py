import math

import pytest
import torch

from rftmega.algorithms.kl import ESTIMATORS, KLController
from rftmega.algorithms.losses import policy_loss
from rftmega.core.types import Experience, TokenStats


@pytest.mark.parametrize("delta", [-3.0, -0.1, 0.0, 1e-4, 0.7, 5.0])
def test_values_and_gradients_are_those_of_the_formulas(delta: float) -> None:
    values = {"k1": delta, "k2": delta**2 / 2, "k3": math.exp(-delta) - 1 + delta}
    gradients = {"k1": 1.0, "k2": delta, "k3": 1 - math.exp(-delta)}
    values["unbiased"], gradients["unbiased"] = values["k3"], gradients["k3"]  # before the ratio
    for name, estimator in ESTIMATORS.items():
        x = torch.tensor(delta, dtype=torch.float64, requires_grad=True)
        y = estimator(x)
        y.backward()
        assert y.item() == pytest.approx(values[name], rel=1e-9, abs=1e-12), name
        assert x.grad is not None
        assert x.grad.item() == pytest.approx(gradients[name], rel=1e-9, abs=1e-12), name


def test_k1_and_k3_estimate_the_kl_of_two_distributions() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(8).softmax(0), torch.randn(8).softmax(0)
    exact = (p * (p / q).log()).sum()
    drawn = torch.multinomial(p, 200_000, replacement=True)
    delta = (p / q).log()[drawn]
    for name in ("k1", "k3"):
        assert ESTIMATORS[name](delta).mean().item() == pytest.approx(exact.item(), rel=0.03), name


def test_the_unbiased_kl_has_the_gradient_of_the_kl_and_k3_has_not() -> None:
    """The expected gradient of the loss over all eight tokens, exactly, against autograd through
    the KL of the two distributions.
    """
    torch.manual_seed(0)
    logits = torch.randn(8, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(8, dtype=torch.float64).log_softmax(0)
    every = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((every.exp() * (every - reference)).sum(), logits)
    found = {}
    for name in ("k2", "k3", "unbiased"):
        logp = logits.log_softmax(0)[:, None]
        old = logp.detach()
        one = torch.ones(8, 1, dtype=torch.bool)
        zero = torch.zeros(8, 1, dtype=torch.float64)
        experience = Experience(
            tokens=torch.zeros(8, 2, dtype=torch.int64), prompt_lengths=torch.ones(8, dtype=torch.int64),
            lengths=torch.full((8,), 2), mask=one, behaviour_logp=old, old_logp=old, reference_logp=reference[:, None],
            advantage=zero,
        )  # fmt: skip
        loss = policy_loss(kl_coef=1.0, kl_estimator=name)(TokenStats(logp, None), experience)
        drawn = (loss.value * old.exp()).sum()
        (found[name],) = torch.autograd.grad(drawn, logits)
    torch.testing.assert_close(found["unbiased"], exact)
    torch.testing.assert_close(found["k2"], exact)
    assert (found["k3"] - exact).norm() > 0.1 * exact.norm()


def test_without_a_target_the_weight_stays() -> None:
    controller = KLController(0.3)
    controller.update(100.0, 512)
    assert controller.value == 0.3


@pytest.mark.parametrize(
    ("seen", "factor"),
    [(0.1, 1.0), (0.11, 1 + 0.1 * 0.05), (5.0, 1 + 0.2 * 0.05), (0.0, 1 - 0.2 * 0.05)],
)
def test_with_one_it_follows_what_is_seen_by_at_most_a_fifth_of_the_horizon(
    seen: float, factor: float
) -> None:
    controller = KLController(0.3, target=0.1, horizon=10_000)
    controller.update(seen, 500)
    assert controller.value == pytest.approx(0.3 * factor)


def test_however_many_answers_a_step_has_the_weight_keeps_its_sign() -> None:
    controller = KLController(0.01, target=0.1, horizon=100)
    controller.update(0.0, 100_000)
    assert controller.value == pytest.approx(0.008)
