"""Vocabulary-parallel log-prob and entropy against dense autograd in float64."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftmega.megatron.logprobs import vocab_parallel_stats
from tests.ranks import run_ranks

VOCABULARY, TOKENS = 11, 6


def case(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = scale * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64)
    targets = torch.tensor([0, 10, 3, 5, 6, 2])
    return logits, targets, torch.randn(TOKENS, dtype=torch.float64), torch.randn(TOKENS, dtype=torch.float64)


def dense(scale: float, temperature: float) -> tuple[torch.Tensor, ...]:
    logits, targets, weight, entropy_weight = case(scale)
    logits.requires_grad_()
    logp = (logits / temperature).log_softmax(-1)
    picked = logp.gather(-1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (picked * weight + entropy * entropy_weight).sum().backward()
    return picked.detach(), entropy.detach(), logits.grad


def sharded_body(world: Any, scale: float, temperature: float) -> tuple[torch.Tensor, ...]:
    logits, targets, weight, entropy_weight = case(scale)
    width = -(-VOCABULARY // world.size)
    padded = torch.full((TOKENS, width * world.size), 1e4, dtype=torch.float64)  # padding that would win every softmax
    padded[:, :VOCABULARY] = logits
    mine = padded[:, world.rank * width : (world.rank + 1) * width].float().requires_grad_()
    before = mine.detach().clone()
    logp, entropy = vocab_parallel_stats(
        mine, targets, temperature=temperature, vocabulary=VOCABULARY, rank=world.rank, group=dist.group.WORLD
    )
    (logp * weight.float() + entropy * entropy_weight.float()).sum().backward()
    assert torch.equal(mine.detach(), before), "the logits were overwritten"
    return logp.detach(), entropy.detach(), mine.grad


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (3.0, 0.7), (1000.0, 1.0)])
def test_values_and_gradients_equal_dense_autograd(ranks: int, scale: float, temperature: float) -> None:
    logp, entropy, grad = dense(scale, temperature)
    results = run_ranks(ranks, sharded_body, scale, temperature)
    tolerance = {"atol": 1e-5 * max(1.0, scale / 10), "rtol": 1e-5}
    for found_logp, found_entropy, _ in results:
        torch.testing.assert_close(found_logp.double(), logp, **tolerance)
        torch.testing.assert_close(found_entropy.double(), entropy, **tolerance)
    found_grad = torch.cat([g for _, _, g in results], dim=1)
    torch.testing.assert_close(found_grad[:, :VOCABULARY].double(), grad, **tolerance)
    assert found_grad[:, VOCABULARY:].abs().sum() == 0, "padding got a gradient"


def test_entropy_alone_and_log_prob_alone_have_gradients() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    for pick in (0, 1):
        logits.grad = None
        stats = vocab_parallel_stats(logits, torch.tensor([0, 1, 2]), temperature=1.0, vocabulary=5, rank=0, group=None)
        stats[pick].sum().backward()
        assert logits.grad is not None
        assert logits.grad.abs().sum() > 0
