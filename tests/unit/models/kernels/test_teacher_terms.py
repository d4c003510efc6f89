"""Divergences from a few of a teacher's tokens, and from the sampled one."""

import pytest
import torch

from rftmega.models.kernels.linear_divergence import DivergenceKind
from rftmega.models.kernels.teacher_terms import bucket_divergence, sampled_divergence

KINDS = [DivergenceKind("reverse_kl"), DivergenceKind("forward_kl"), DivergenceKind("jsd", 0.35)]


def plain(p: list[float], q: list[float], kind: DivergenceKind) -> float:
    def kl(one: list[float], other: list[float]) -> float:
        ratios = (torch.tensor(x / y).log().item() for x, y in zip(one, other, strict=True))
        return sum(x * ratio for x, ratio in zip(one, ratios, strict=True))

    if kind.name == "reverse_kl":
        return kl(p, q)
    if kind.name == "forward_kl":
        return kl(q, p)
    m = [kind.beta * y + (1 - kind.beta) * x for x, y in zip(p, q, strict=True)]
    return kind.beta * kl(q, m) + (1 - kind.beta) * kl(p, m)


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_are_compared_as_a_distribution(kind: DivergenceKind) -> None:
    p, q = [0.2, 0.5, 0.3], [0.6, 0.15, 0.25]
    given = (torch.tensor([x]).log() for x in (p, q))
    found = bucket_divergence(*given, kind)
    assert found.item() == pytest.approx(plain(p, q, kind), abs=1e-6)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_the_gradient_from_one_sampled_token_is_that_of_the_divergence_on_average(
    name: str,
) -> None:
    kind = DivergenceKind(name)  # type: ignore[arg-type]
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 6, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), teacher.log_softmax(0)
    exact = bucket_divergence(log_p[None], log_q[None], kind).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    of_tokens = sampled_divergence(log_p, log_q, kind)
    (found,) = torch.autograd.grad((log_p.exp().detach() * of_tokens).sum(), logits)
    torch.testing.assert_close(found, wanted)


def test_one_sampled_token_gives_no_mixture() -> None:
    with pytest.raises(ValueError, match="more than the sampled token"):
        sampled_divergence(torch.zeros(1), torch.zeros(1), DivergenceKind("jsd"))
