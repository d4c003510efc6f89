"""The gated delta rule against a loop over tokens in float64, and against transformers' rule."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from rftmega.models.kernels.delta_rule import (
    CHUNK,
    behind_gaps,
    causal_convolution,
    divided,
    gated_delta_rule,
    order_of_rows,
)
from rftmega.run.planning.activations import RULE_CHUNK

EDGES = [0, 5, 6, 150, 150, 214, 343]  # a row of one token, none, a whole chunk, and more


def inputs(tokens: int) -> tuple[Tensor, ...]:
    drawn = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=drawn).requires_grad_()

    decay = -F.softplus(3 * random(6))  # down to e^-9: a state is soon forgotten, or never
    return random(2, 8), random(2, 8), random(6, 5), decay, random(6).sigmoid()


def by_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, edges: list[int]
) -> Tensor:
    query, key, value, decay, rate = (x.double() for x in (query, key, value, decay, rate))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    found: list[Tensor] = []
    for start, stop in zip(edges, edges[1:], strict=False):
        state = torch.zeros(6, 8, 5, dtype=torch.float64)
        for token in range(start, stop):
            asked, known = (x[token].repeat_interleave(3, 0) for x in (query, key))
            state = decay[token].exp()[:, None, None] * state
            missing = value[token] - torch.einsum("hkv,hk->hv", state, known)
            state = state + rate[token][:, None, None] * known[:, :, None] * missing[:, None]
            found.append(torch.einsum("hkv,hk->hv", state, asked) / 8**0.5)
    return torch.stack(found)


def test_outputs_and_gradients_are_those_of_a_loop_over_tokens() -> None:
    given = inputs(EDGES[-1])
    ours, wanted = gated_delta_rule(*given, divided(EDGES)), by_token(*given, EDGES)
    torch.testing.assert_close(ours.double(), wanted, atol=3e-6, rtol=0)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4))
    gradients = (
        torch.autograd.grad((weights * out).sum(), given, retain_graph=True)
        for out in (ours, wanted)
    )
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


def test_a_row_is_computed_as_transformers_computes_it() -> None:
    given = [x.detach() for x in inputs(150)]
    ours = gated_delta_rule(*given, divided([0, 150]))
    query, key = (x.repeat_interleave(3, 1)[None] for x in given[:2])
    value, decay, rate = (x[None] for x in given[2:])
    wanted, _ = torch_chunk_gated_delta_rule(
        query, key, value, g=decay, beta=rate, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(ours, wanted[0], atol=1e-6, rtol=0)


def test_a_decay_that_forgets_everything_at_once_gives_no_infinity() -> None:
    query, key, value, _, rate = (x.detach() for x in inputs(70))
    decay = torch.full((70, 6), -1e4).requires_grad_()
    found = gated_delta_rule(query, key, value, decay, rate, divided([0, 70]))
    torch.testing.assert_close(
        found.double(), by_token(query, key, value, decay, rate, [0, 70]), atol=1e-6, rtol=0
    )
    (gradient,) = torch.autograd.grad(found.sum(), decay)
    assert gradient.isfinite().all()


def test_half_precision_is_computed_in_float32() -> None:
    given = [x.detach().bfloat16() for x in inputs(90)]
    found = gated_delta_rule(*given, divided([0, 90]))
    assert found.dtype == torch.bfloat16
    wanted = by_token(*given, [0, 90])
    assert (found.double() - wanted).abs().max() < 2**-8 * wanted.abs().max()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_sees_its_own_row_only(width: int) -> None:
    drawn = torch.Generator().manual_seed(1)
    given, weight = (
        torch.randn(*shape, generator=drawn, dtype=torch.float64)
        for shape in ((343, 7), (7, width))
    )
    rows = (
        given[start:stop].T for start, stop in zip(EDGES, EDGES[1:], strict=False) if stop > start
    )
    wanted = [F.conv1d(F.pad(row, (width - 1, 0)), weight[:, None], groups=7).T for row in rows]
    found = causal_convolution(given, weight, behind_gaps(EDGES, width - 1), len(EDGES) - 1)
    torch.testing.assert_close(found, torch.cat(wanted))


@pytest.mark.parametrize("processes", [2, 3])
def test_tokens_of_context_parallel_processes_are_put_back_in_order(processes: int) -> None:
    unit = 2 * processes
    edges = [0, 3 * unit, 4 * unit, 9 * unit]
    gathered: list[int] = []
    for rank in range(processes):
        for start, stop in zip(edges, edges[1:], strict=False):
            chunks = torch.arange(start, stop).chunk(unit)
            gathered += [*chunks[rank].tolist(), *chunks[unit - 1 - rank].tolist()]
    order = order_of_rows(edges, processes)
    assert torch.tensor(gathered)[order].tolist() == list(range(edges[-1]))


def test_the_planner_knows_the_size_of_a_chunk() -> None:
    assert RULE_CHUNK == CHUNK
