"""Attention over a tree of segments, against scores written out in float64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.backends.fsdp import packed_attention
from rftmega.backends.fsdp.packed_attention import EDGES, Edges, attend_rows
from rftmega.core.shared_prefixes import SortedRows
from rftmega.models.kernels import tree_attention
from rftmega.models.kernels.tree_attention import SegmentTree, attend_to_tree
from tests.unit.backends.fsdp.test_packed_attention import flash_rows
from tests.unit.core.test_shared_prefixes import padded, rows_of
from tests.unit.models.layers.test_attention import attention

SCALE = 0.3
WIDE = 10**6  # a window that bounds nothing


def tree_and_mask(seed: int) -> tuple[SegmentTree, Tensor, Tensor]:
    """A tree; [N, N]: the tokens that each attends to; [N]: the position of each in its rows."""
    rows = rows_of(seed)
    tokens, lengths = padded(rows)
    packed = SortedRows.of(tokens, lengths).packed(tokens.shape[1])
    size = len(packed.slots)
    mask, position = torch.zeros(size, size, dtype=torch.bool), torch.zeros(size)
    places = packed.places.view(len(rows), -1)
    for row, own in zip(rows, places, strict=True):
        for end in range(len(row)):
            mask[own[end], own[: end + 1]] = True
            position[own[end]] = end
    return SegmentTree(packed.segments), mask, position


def tensors(size: int, heads: int, groups: int, width: int, values: int) -> list[Tensor]:
    torch.manual_seed(size)
    shapes = ((size, heads, width), (size, groups, width), (size, groups, values))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, cap: float | None
) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    scores = SCALE * torch.einsum("qhd,khd->hqk", query, key)
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([sinks[:, None, None].expand(-1, len(mask), 1), scores], -1)
    weights = scores.softmax(-1)[..., -len(mask) :]
    return torch.einsum("hqk,khd->qhd", weights, value)


def assert_equal(found: Tensor, wanted: Tensor, given: list[Tensor]) -> None:
    """Values and all gradients."""
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    weights = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "values"), [(4, 2, 8, 8), (3, 3, 24, 12), (6, 1, 10, 10)]
)
def test_a_token_attends_to_its_path_as_in_dense_attention(
    heads: int, groups: int, width: int, values: int, sink: bool
) -> None:
    for seed in range(4):
        tree, mask, _ = tree_and_mask(seed)
        given = tensors(len(mask), heads, groups, width, values)
        sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True) if sink else None
        found = attend_to_tree(*given, tree, SCALE, sinks)
        wanted = dense(*given, mask, sinks, None)
        assert_equal(found, wanted, given if sinks is None else [*given, sinks])


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [1, 7, 25, 60, WIDE])
def test_megatrons_layers_bound_the_path_by_their_window(window: int, sinks: int) -> None:
    tree, mask, position = tree_and_mask(5)
    made = attention(window, sinks=sinks)
    given = tensors(len(mask), 4, 2, 8, 8)
    packed: Any = SimpleNamespace(tree=tree, max_seqlen_q=tree.longest)
    found = made(*given, packed_seq_params=packed).unflatten(1, (4, 8))
    near = mask & (position[:, None] - position < window)
    assert_equal(found, dense(*given, near, made.softmax_offset, None), given)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 25, WIDE])
def test_layers_of_transformers_bound_the_path_and_the_scores(
    window: int | None, sink: bool, cap: float | None
) -> None:
    tree, mask, position = tree_and_mask(6)
    given = tensors(len(mask), 4, 2, 8, 8)
    sinks = torch.randn(4, dtype=torch.float64) if sink else None
    rows = (x.transpose(0, 1)[None] for x in given)
    edges = Edges([0, *(segment.stop for segment in tree.segments)], tree)
    found, _ = attend_rows(
        torch.nn.Module(),
        *rows,
        None,
        scaling=SCALE,
        sliding_window=window,
        softcap=cap,
        s_aux=sinks,
        **{EDGES: edges},
    )
    near = mask & (position[:, None] - position < (window or WIDE))
    # without a kernel transformers' own softmax is in float32
    wanted = dense(*given, near, sinks, cap)
    rough = cap is not None or (sink and window not in (None, WIDE))
    torch.testing.assert_close(
        found[0], wanted, rtol=1e-5 if rough else 1e-11, atol=1e-5 if rough else 1e-11
    )


@pytest.mark.parametrize("window", [1, 7, 25])
def test_on_cuda_a_window_over_shared_tokens_is_one_call_of_flash_attention(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "takes_rows", lambda query, value: True)
    monkeypatch.setattr(packed_attention, "varlen_attn", flash_rows)
    tree, mask, position = tree_and_mask(8)
    given = tensors(len(mask), 4, 2, 8, 8)
    rows = (x.transpose(0, 1)[None] for x in given)
    edges = Edges([0, *(segment.stop for segment in tree.segments)], tree)
    found, _ = attend_rows(
        torch.nn.Module(), *rows, None, scaling=SCALE, sliding_window=window, **{EDGES: edges}
    )
    near = mask & (position[:, None] - position < window)
    assert_equal(found[0], dense(*given, near, None, None), given)
    device = torch.device("cpu")
    assert tree.reached(device, window)[0] is tree.reached(device, window)[0]


def test_without_a_kernel_the_keys_of_each_path_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for float32 on CUDA, which is not shared by default."""
    monkeypatch.setattr("rftmega.models.layers.attention.has_kernel", lambda query: False)
    tree, mask, _ = tree_and_mask(7)
    given = tensors(len(mask), 4, 2, 8, 8)
    packed: Any = SimpleNamespace(tree=tree, max_seqlen_q=tree.longest)
    found = attention()(*given, packed_seq_params=packed).unflatten(1, (4, 8))
    assert_equal(found, dense(*given, mask, None, None), given)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_edges: Tensor,
    key_edges: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    *_: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """FlashAttention's arguments and results, by torch's kernel for a CPU."""
    outputs, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for span in spans(query_edges, key_edges, longest_query, longest_key):
        rows = [
            x[own].transpose(0, 1)[None] for x, own in zip((query, key, value), span, strict=True)
        ]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, own = kernel(*rows, dropout, causal, scale=scale)
        outputs[span[0]], sums[:, span[0]] = out[0].transpose(0, 1), own[0]
    return outputs, sums, torch.tensor(7), torch.tensor(8), torch.tensor(9)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:  # fmt: skip
    *lengths, dropout, causal, seed, unused = rest
    assert (int(seed), int(unused)) == (7, 8)
    assert sums.is_contiguous()
    found = [torch.zeros_like(x) for x in (query, key, value)]
    for span in spans(*lengths):
        given = [
            x[own].transpose(0, 1)[None]
            for x, own in zip(
                (grad, query, key, value, out), (span[0], *span, span[0]), strict=True
            )
        ]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        pulls = kernel(*given, sums[None, :, span[0]].contiguous(), dropout, causal, scale=scale)
        for whole, own, pull in zip(found, span, pulls, strict=True):
            whole[own] = pull[0].transpose(0, 1)
    return tuple(found)


def spans(
    query_edges: Tensor, key_edges: Tensor, longest_query: int, longest_key: int
) -> list[tuple[slice, slice, slice]]:
    assert query_edges.dtype == key_edges.dtype == torch.int32
    assert int(query_edges.diff().max()) == longest_query
    assert int(key_edges.diff().max()) == longest_key
    runs = [[slice(a, b) for a, b in zip(x, x[1:], strict=False)] for x in (query_edges, key_edges)]
    return [(queries, keys, keys) for queries, keys in zip(*runs, strict=True)]


def test_on_cuda_each_part_is_one_call_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return kernel(*given, **named)

        return called

    kernels = SimpleNamespace(
        _flash_attention_forward=noted("forward", flash),
        _flash_attention_backward=noted("backward", flash_backward),
    )
    tree, mask, _ = tree_and_mask(9)
    given = [x.detach().float().requires_grad_() for x in tensors(len(mask), 4, 2, 8, 8)]
    monkeypatch.setattr(tree_attention, "aten", kernels)
    calls_on_cuda = [tree_attention._Gathered(part, torch.device("cpu")) for part in tree.parts]
    monkeypatch.setattr(tree, "calls", lambda where: calls_on_cuda)
    assert len(tree.parts) == 3
    sinks = torch.randn(4, requires_grad=True)
    found = attend_to_tree(*given, tree, SCALE, sinks)
    wanted = dense(*given, mask, sinks, None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert calls == ["forward"] * 3 + ["backward"] * 3
