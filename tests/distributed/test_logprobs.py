"""The fused linear -> (log-prob, entropy) against dense autograd in float64: values, gradients,
memory.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftmega.models.kernels import linear_log_probs
from rftmega.models.kernels.linear_log_probs import VocabularyShard as Shard
from rftmega.models.kernels.linear_log_probs import linear_stats
from rftmega.runtime.device import CPU, CUDA
from tests.imitation_cuda import ImitationCUDA
from tests.ranks import run_ranks

VOCABULARY, TOKENS, HIDDEN = 9, 6, 5


def case(scale: float) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias, targets, a temperature a token, and what log-prob and entropy weigh in the
    loss.
    """
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(TOKENS, HIDDEN, dtype=torch.float64),
        torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64),
        torch.randn(VOCABULARY, dtype=torch.float64),
    )
    targets = torch.tensor([0, 8, 3, 5, 6, 2])
    temperature = torch.tensor([1.0, 0.7, 2.0, 1.0, 0.5, 1.3], dtype=torch.float64)
    return (
        hidden,
        scale * weight,
        scale * bias,
        targets,
        temperature,
        torch.randn(TOKENS).double(),
        torch.randn(TOKENS).double(),
    )


def dense(scale: float, cap: float | None) -> tuple[torch.Tensor, ...]:
    hidden, weight, bias, targets, temperature, on_logp, on_entropy = case(scale)
    hidden.requires_grad_()
    weight.requires_grad_()
    bias.requires_grad_()
    logits = hidden @ weight.T + bias
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logp = (logits / temperature[:, None]).log_softmax(-1)
    picked = logp.gather(-1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (picked * on_logp + entropy * on_entropy).sum().backward()
    return picked.detach(), entropy.detach(), hidden.grad, weight.grad, bias.grad


CASES = (  # scale of the weights, tokens of a chunk, soft cap of the logits
    *((1.0, 1, None), (3.0, 4, None), (1000.0, 100, None)),
    *((1.0, 4, 2.5), (3.0, 1, 6.0), (3.0, 100, 2.5)),
)


def sharded_body(world: Any) -> list[tuple[torch.Tensor, ...]]:
    return [sharded(world, *each) for each in CASES]


def sharded(world: Any, scale: float, chunk: int, cap: float | None) -> tuple[torch.Tensor, ...]:
    hidden, weight, bias, targets, temperature, on_logp, on_entropy = (
        x if x.dtype == torch.int64 else x.float() for x in case(scale)
    )
    width = -(-VOCABULARY // world.size)
    # padding rows that would win many a softmax
    padded = torch.full((width * world.size, HIDDEN), 50.0)
    padded[:VOCABULARY] = weight
    biases = torch.full((width * world.size,), 50.0)
    biases[:VOCABULARY] = bias
    own = slice(world.rank * width, (world.rank + 1) * width)
    mine = padded[own].clone().requires_grad_()
    bias = biases[own].clone().requires_grad_()
    hidden.requires_grad_()
    shard = Shard.of_rank(width, vocabulary=VOCABULARY, rank=world.rank, group=dist.group.WORLD)
    logp, entropy = linear_stats(
        hidden, mine, targets, temperature, shard, bias=bias, cap=cap, chunk=chunk
    )
    (logp * on_logp + entropy * on_entropy).sum().backward()
    return logp.detach(), entropy.detach(), hidden.grad, mine.grad, bias.grad


@pytest.mark.parametrize("ranks", [1, 2, 4])  # of 4, one holds padding only
def test_values_and_gradients_equal_dense_autograd(ranks: int) -> None:
    for (scale, _, cap), *results in zip(CASES, *run_ranks(ranks, sharded_body), strict=True):
        assert_equal_to_dense(scale, cap, results)


def assert_equal_to_dense(
    scale: float, cap: float | None, results: list[tuple[torch.Tensor, ...]]
) -> None:
    logp, entropy, grad_hidden, grad_weight, grad_bias = dense(scale, cap)
    for found_logp, found_entropy, *_ in results:
        torch.testing.assert_close(found_logp.double(), logp, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_entropy.double(), entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        sum(r[2] for r in results).double(), grad_hidden, atol=1e-5, rtol=1e-5
    )
    for number, wanted in ((3, grad_weight), (4, grad_bias)):
        found = torch.cat([r[number] for r in results])
        torch.testing.assert_close(found[:VOCABULARY].double(), wanted, atol=1e-5, rtol=1e-5)
        assert found[VOCABULARY:].abs().sum() == 0, "padding got a gradient"


@pytest.mark.parametrize("pick", [0, 1])
def test_log_prob_alone_and_entropy_alone_have_gradients(pick: int) -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    linear_stats(torch.randn(4, 3), weight, torch.tensor([0, 1, 2, 4]), 1.0, Shard(0, 5, None))[
        pick
    ].sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def fused_by(backend: str | None) -> Any:
    """Computes a case of two chunks in bfloat16, with padding: values and gradients."""
    hidden, weight, bias, targets, temperature, on_logp, on_entropy = (
        x if x.dtype == torch.int64 else x.float() for x in case(1.0)
    )
    padded = torch.cat([weight, torch.full((2, HIDDEN), 50.0)])
    biases = torch.cat([bias, torch.full((2,), 50.0)])
    hidden, padded, biases = (x.bfloat16().requires_grad_() for x in (hidden, padded, biases))
    found = []

    def compiled(function: Any) -> Any:
        found.append(function.__name__)
        return torch.compile(function, backend=backend, fullgraph=True) if backend else function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_log_probs, "fused", compiled)
        shard = Shard(0, VOCABULARY, None)
        logp, entropy = linear_stats(
            hidden, padded, targets, temperature, shard, bias=biases, chunk=4
        )
        (logp * on_logp + entropy * on_entropy).sum().backward()
    assert found == ["_row_sums"] * 2 + ["_gradient"] * 2
    return logp.detach(), entropy.detach(), hidden.grad, padded.grad, biases.grad


def test_what_is_compiled_is_what_is_not() -> None:
    for found, wanted in zip(fused_by("aot_eager"), fused_by(None), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_device_compiles_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPU().compiled(dense) is dense
    cuda = CUDA(ImitationCUDA())
    monkeypatch.setattr(torch, "compile", lambda function: ("compiled", function))
    for spec, wanted in ((None, dense), (object(), ("compiled", dense))):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert cuda.compiled(dense) == wanted


def test_in_bfloat16_a_target_that_is_nearly_certain_has_its_own_gradient() -> None:
    """1 - p is 0.007 there, less than bfloat16 can tell beside 1."""
    weight = torch.tensor([[5.0], [0.0], [0.0]]).bfloat16()
    hidden = torch.ones(2, 1).bfloat16().requires_grad_()
    targets = torch.tensor([0, 1])
    logp, _ = linear_stats(hidden, weight, targets, 1.0, Shard(0, 3, None), chunk=1)
    logp.sum().backward()
    p = torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64).softmax(-1)[0].item()
    torch.testing.assert_close(
        hidden.grad.double()[:, 0],
        torch.tensor([5 * (1 - p), -5 * p]).double(),
        rtol=0.01,
        atol=0.0,
    )


def largest_allocation(tokens: int) -> int:
    """Largest number of elements of any tensor made while forward and backward run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    self.largest = max(self.largest, x.numel())
            return out

    hidden, weight = (
        torch.randn(tokens, 4, requires_grad=True),
        torch.randn(1000, 4, requires_grad=True),
    )
    with Watch() as watch:
        logp, entropy = linear_stats(
            hidden,
            weight,
            torch.zeros(tokens, dtype=torch.int64),
            1.0,
            Shard(0, 1000, None),
            chunk=16,
        )
        (logp + entropy).sum().backward()
    return watch.largest


def test_no_tensor_grows_with_tokens_times_vocabulary() -> None:
    assert largest_allocation(64) == largest_allocation(512) == 16 * 1000
