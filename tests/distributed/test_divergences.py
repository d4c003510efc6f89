"""The kernels of distillation against dense autograd in float64: divergences of two models over the
whole vocabulary, and log-probs of chosen tokens with a tail.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.models.kernels.chunked_head import Head
from rftmega.models.kernels.linear_buckets import largest_buckets, linear_buckets
from rftmega.models.kernels.linear_divergence import DivergenceKind, linear_divergence
from rftmega.models.kernels.linear_log_probs import VocabularyShard as Shard
from tests.ranks import run_ranks

VOCABULARY, POSITIONS, HIDDEN, TEACHER, RANK, CHOSEN = 11, 7, 5, 8, 2, 3
DIVERGENCES = (
    DivergenceKind("reverse_kl"),
    DivergenceKind("forward_kl"),
    DivergenceKind("jsd", 0.5),
    DivergenceKind("jsd", 0.15),
)
# positions of a chunk, soft cap and factor of the student's logits, scale of the weights
CASES = ((1, None, 1.0, 0.5), (3, 2.5, 1.7, 0.5), (100, None, 0.6, 1.0), (4, 4.0, 1.0, 2.0))
NAMES = ("hidden", "weight", "bias", "inner", "up")


def tensors(scale: float) -> dict[str, Tensor]:
    """Random tensors in float64 of a student with a LoRA pair and of a wider teacher."""
    torch.manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).double()

    return {
        "hidden": random(POSITIONS, HIDDEN),
        "weight": scale * random(VOCABULARY, HIDDEN),
        "bias": random(VOCABULARY),
        "inner": random(POSITIONS, RANK),
        "up": 0.25 * random(VOCABULARY, RANK),
        "teacher_hidden": random(POSITIONS, TEACHER),
        "teacher_weight": scale * random(VOCABULARY, TEACHER),
        "teacher_bias": random(VOCABULARY),
        "temperature": (0.7 + 0.5 * random(POSITIONS).abs()).float().double(),
        "pull": random(POSITIONS),
        "pulls": random(POSITIONS, CHOSEN + 1),
    }


def dense_log_probs(given: dict[str, Tensor], cap: float | None, factor: float) -> Tensor:
    x = given["hidden"] @ given["weight"].T + given["bias"] + given["inner"] @ given["up"].T
    x = x if cap is None else cap * torch.tanh(x / cap)
    return (factor * x / given["temperature"][:, None]).log_softmax(-1)


def dense_teacher(given: dict[str, Tensor]) -> Tensor:
    y = given["teacher_hidden"] @ given["teacher_weight"].T + given["teacher_bias"]
    return (0.8 * 3.0 * torch.tanh(y / 3.0) / given["temperature"][:, None]).log_softmax(-1)


def dense_divergence(log_p: Tensor, log_q: Tensor, chosen: DivergenceKind) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    if chosen.name == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    if chosen.name == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    m = chosen.beta * q + (1 - chosen.beta) * p
    of_teacher = (q * (log_q - m.log())).sum(-1)
    return chosen.beta * of_teacher + (1 - chosen.beta) * (p * (log_p - m.log())).sum(-1)


def chosen_ids() -> Tensor:
    torch.manual_seed(5)
    return torch.stack([torch.randperm(VOCABULARY)[:CHOSEN] for _ in range(POSITIONS)])


def dense_buckets(log_p: Tensor, ids: Tensor) -> Tensor:
    others = torch.ones_like(log_p).scatter(-1, ids, 0.0).bool()
    tail = log_p.masked_fill(~others, -torch.inf).logsumexp(-1)
    return torch.cat([log_p.gather(-1, ids), tail[:, None]], -1)


def padded(weight: Tensor, width: int, fill: float) -> Tensor:
    """The rows of a rank's shard, with padding that would win many a softmax."""
    found = torch.full((width, *weight.shape[1:]), fill)
    found[: len(weight)] = weight.float()
    return found


def sharded_body(world: Any) -> list[tuple[Any, ...]]:
    found = []
    for chunk, cap, factor, scale in CASES:
        given = tensors(scale)
        width = -(-VOCABULARY // world.size)
        own = slice(world.rank * width, (world.rank + 1) * width)
        shard = Shard.of_rank(width, vocabulary=VOCABULARY, rank=world.rank, group=dist.group.WORLD)
        mine = {
            name: padded(given[name][own], width, fill)
            for name, fill in (("weight", 50.0), ("bias", 50.0), ("up", 9.0))
        }
        mine |= {name: given[name].float() for name in ("hidden", "inner")}
        teacher_head = Head(
            padded(given["teacher_weight"][own], width, 50.0),
            padded(given["teacher_bias"][own], width, 50.0),
            cap=3.0,
            factor=0.8,
        )
        temperature, pull = given["temperature"].float(), given["pull"].float()
        for divergence in (*DIVERGENCES, None):
            leaves = {name: value.clone().requires_grad_() for name, value in mine.items()}
            head = Head(
                leaves["weight"], leaves["bias"], (leaves["inner"], leaves["up"]), cap, factor
            )
            if divergence is None:
                value = linear_buckets(
                    leaves["hidden"], head, chosen_ids(), temperature, shard, chunk=chunk
                )
                (value * given["pulls"].float()).sum().backward()
            else:
                value = linear_divergence(
                    leaves["hidden"],
                    given["teacher_hidden"].float(),
                    head,
                    teacher_head,
                    divergence,
                    temperature,
                    shard,
                    chunk=chunk,
                )
                (value * pull).sum().backward()
            found.append((value.detach(), *[leaves[name].grad for name in NAMES]))
    return found


def wanted(
    cap: float | None, factor: float, scale: float, divergence: DivergenceKind | None
) -> Any:
    given = tensors(scale)
    for name in NAMES:
        given[name].requires_grad_()
    log_p, log_q = dense_log_probs(given, cap, factor), dense_teacher(given)
    if divergence is None:
        value = dense_buckets(log_p, chosen_ids())
        (value * given["pulls"]).sum().backward()
    else:
        value = dense_divergence(log_p, log_q, divergence)
        (value * given["pull"]).sum().backward()
    return value.detach(), *[given[name].grad for name in NAMES]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_divergences_and_buckets_equal_dense_autograd(ranks: int) -> None:
    of_ranks = run_ranks(ranks, sharded_body)
    number = 0
    for _, cap, factor, scale in CASES:
        for divergence in (*DIVERGENCES, None):
            value, hidden, weight, bias, inner, up = wanted(cap, factor, scale, divergence)
            results = [found[number] for found in of_ranks]
            number += 1
            for found in results:
                close(found[0], value, scale)
            close(sum(found[1] for found in results), hidden, scale)
            close(sum(found[4] for found in results), inner, scale)
            for place, dense in ((2, weight), (3, bias), (5, up)):
                whole = torch.cat([found[place] for found in results])
                close(whole[:VOCABULARY], dense, scale)
                assert not whole[VOCABULARY:].any(), "padding got a gradient"


def close(found: Tensor, dense: Tensor, scale: float = 1.0) -> None:
    """Within 1e-6 of the largest element; with weights of a scale above 1, whose logits float32
    rounds by more, that times the scale.
    """
    largest = max(dense.abs().max().item(), 1.0) * max(scale, 1.0)
    assert (found.double() - dense).abs().max().item() <= 1e-6 * largest, (found, dense)


def largest_body(world: Any) -> tuple[Tensor, Tensor]:
    given = tensors(1.0)
    width = -(-VOCABULARY // world.size)
    own = slice(world.rank * width, (world.rank + 1) * width)
    shard = Shard.of_rank(width, vocabulary=VOCABULARY, rank=world.rank, group=dist.group.WORLD)
    head = Head(
        padded(given["teacher_weight"][own], width, 50.0),
        padded(given["teacher_bias"][own], width, 50.0),
        cap=3.0,
        factor=0.8,
    )
    hidden, temperature = given["teacher_hidden"].float(), given["temperature"].float()
    return largest_buckets(hidden, head, 4, temperature, shard, chunk=3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_likeliest_tokens_of_all_ranks_and_their_tail(ranks: int) -> None:
    log_q = dense_teacher(tensors(1.0))
    best = log_q.topk(4, dim=-1).indices
    for ids, buckets in run_ranks(ranks, largest_body):
        assert torch.equal(ids, best)
        close(buckets, dense_buckets(log_q, best))
