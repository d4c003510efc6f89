"""Attention in plain torch: against scores written out in float64, and without ever holding a row's
scores or mask.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rftmega.backends.megatron.forward import pack
from rftmega.core.errors import ConfigError

# isort: split

from megatron.core.transformer.enums import AttnMaskType

from rftmega.models.kernels import prefix_attention
from rftmega.models.layers.attention import LONGEST, PackedAttention
from rftmega.models.layers.context_attention import chunks_of


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax over all scores of [b, heads, q, d] and [b, groups, k, d]; the last query sees the
    last key. `sinks`: [heads] scores of one more key of each head, whose value is 0.
    """
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    places = torch.arange(key.shape[2])
    behind = places[-query.shape[2] :, None] - places
    scores = (scale * query @ key.transpose(2, 3)).masked_fill(
        (behind < 0) | (behind >= window), -torch.inf
    )
    if sinks is None:
        return scores.softmax(-1) @ value
    everything = torch.cat([sinks[:, None, None].expand(*scores.shape[:3], 1), scores], -1)
    return everything.softmax(-1)[..., 1:] @ value


def tensors(
    heads: int, groups: int, queries: int, keys: int, width: int, values: int
) -> list[Tensor]:
    torch.manual_seed(heads + keys)
    shapes = ((2, heads, queries, width), (2, groups, keys, width), (2, groups, keys, values))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def attention(
    window: int | None = None, dropout: float = 0.0, processes: int = 1, sinks: int = 0
) -> PackedAttention:
    """`sinks`: the number of heads, of which each has a sink; 0: there are none."""
    config: Any = SimpleNamespace(
        window_size=(window - 1, 0) if window else None,
        window_attn_skip_freq=None,
        attention_dropout=dropout,
        context_parallel_size=processes,
        softmax_type="learnable" if sinks else "vanilla",
        num_attention_heads=sinks,
        params_dtype=torch.float64,
        init_method=torch.nn.init.normal_,
    )
    group = SimpleNamespace(size=lambda: processes, rank=lambda: 0)
    made = PackedAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        softmax_scale=0.3,
        pg_collection=SimpleNamespace(cp=group, tp=SimpleNamespace(size=lambda: 1)),
    )
    made.train()
    return made


def assert_equal_to_dense(
    attend: Callable[..., Tensor], given: list[Tensor], window: int, sinks: Tensor | None = None
) -> None:
    """Values and all gradients."""
    found, wanted = attend(*given), dense(*given, 0.3, window, sinks)
    given = given if sinks is None else [*given, sinks]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys", "width", "values"),
    [
        (1, 1, 1, 2, 8, 8),
        (4, 2, 5, 15, 8, 8),
        (4, 4, 7, 28, 24, 12),
        (6, 1, 16, 48, 10, 10),
        (2, 2, 9, 9, 8, 8),
    ],
)
def test_a_chunk_attends_to_its_prefix_and_to_itself_as_in_dense_attention(
    heads: int, groups: int, queries: int, keys: int, width: int, values: int
) -> None:
    """Fewer groups than heads, values narrower than keys, widths that the kernel does not know; a
    whole row.
    """
    assert_equal_to_dense(
        attention()._attend, tensors(heads, groups, queries, keys, width, values), keys
    )


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 140, 150])
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (40, 150)])
def test_a_sink_takes_its_share_of_each_heads_weights(
    queries: int, keys: int, window: int | None, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a kernel, as in float32 on CUDA."""
    monkeypatch.setattr("rftmega.models.layers.attention.has_kernel", lambda query: kernel)
    made = attention(window, sinks=4)
    given = tensors(4, 2, queries, keys, 8, 6)
    assert_equal_to_dense(made._attend, given, window or keys, made.softmax_offset)


@pytest.mark.parametrize("window", [1, 5, 130, 299, 300, 400])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (75, 300), (131, 262)])
def test_a_window_is_the_same_whatever_blocks_it_is_computed_in(
    window: int, queries: int, keys: int
) -> None:
    assert_equal_to_dense(attention(window)._attend, tensors(2, 1, queries, keys, 4, 4), window)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that comes out of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))]
        )
        return found


@pytest.mark.parametrize(("queries", "window"), [(2048, None), (512, None), (2048, 64), (512, 64)])
def test_no_tensor_grows_with_the_square_of_the_row(queries: int, window: int | None) -> None:
    given = tensors(2, 1, queries, 2048, 8, 8)
    with Largest() as largest:
        attention(window)._attend(*given).sum().backward()
        if window is None:
            attention(sinks=2)._attend(*given).sum().backward()
    assert 0 < largest.elements <= 2 * 2 * 2 * 2048 * 8, (
        "more than twice the queries; a block's mask is smaller"
    )


@pytest.mark.parametrize(("length", "dropout", "window", "refused"), [
    (LONGEST + 1, 0.1, None, True), (LONGEST, 0.1, None, False), (LONGEST + 1, 0.0, None, False), (LONGEST + 1, 0.1, 64, False),
])  # fmt: skip
def test_rows_whose_chunks_need_a_mask_are_refused_where_it_would_not_fit(
    length: int, dropout: float, window: int | None, refused: bool
) -> None:
    made = attention(window, dropout, processes=2)
    packed: Any = SimpleNamespace(max_seqlen_q=length)
    if not refused:
        made._refuse_long_rows(torch.zeros(1, 1, 8), packed)
        return
    with pytest.raises(
        ConfigError,
        match=r"8193 tokens under context parallelism with model.dropout above 0.*model.dropout=0",
    ):
        made._refuse_long_rows(torch.zeros(1, 1, 8), packed)


class Called(TorchDispatchMode):
    """The arguments of every kernel of attention, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name():
            wanted = func._schema.arguments
            defaults = {argument.name: argument.default_value for argument in wanted}
            given = {argument.name: value for argument, value in zip(wanted, args, strict=False)}
            self.arguments.append(defaults | given | (kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_of_cuda_are_called_as_they_want_to_be(causal: bool) -> None:
    """Shapes, devices and arguments: fake tensors are of a device that is not here, and compute
    nothing.
    """
    with FakeTensorMode(), torch.no_grad(), Called() as called:
        query, key, value = (
            torch.empty(2, 4, length, 24, device="cuda", dtype=torch.bfloat16)
            for length in (16, 64, 64)
        )
        out, denominator, seeds = prefix_attention._forward(query, key, value, causal, 0.3)
        grads = prefix_attention._backward(
            out, query, key, value, out, denominator, seeds, causal, 0.3
        )
    assert (out.shape, out.dtype, out.device.type) == (query.shape, torch.bfloat16, "cuda")
    assert (denominator.shape, denominator.dtype) == ((2, 4, 16), torch.float32)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    there, back = called.arguments
    assert (there["dropout_p"], there["is_causal"], there["scale"]) == (0.0, causal, 0.3)
    assert (back["dropout_p"], back["is_causal"], back["scale"]) == (0.0, causal, 0.3)
    assert (back["max_q"], back["max_k"]) == (16, 64)
    assert all(
        back[name] is found
        for name, found in (("out", out), ("logsumexp", denominator), ("philox_seed", seeds[-2]))
    )


@pytest.mark.parametrize(
    ("where", "dtype", "width", "can"),
    [
        ("cuda", torch.bfloat16, 256, True),
        ("cuda", torch.bfloat16, 257, False),
        ("cuda", torch.float32, 64, False),
        ("cpu", torch.float32, 300, True),
    ],
)
def test_the_kernels_take_what_they_take(
    where: str, dtype: torch.dtype, width: int, can: bool
) -> None:
    with FakeTensorMode():
        assert (
            prefix_attention.has_kernel(torch.empty(1, 1, 1, width, device=where, dtype=dtype))
            == can
        )


def test_lengths_are_read_on_the_host_once_a_micro_batch() -> None:
    packing = pack(
        torch.ones(3, 8, dtype=torch.bool), context=2, context_rank=1, where=torch.device("cpu")
    )
    packing.sequence.cu_seqlens_q = torch.empty(4, device="meta")  # which has nothing to read
    chunks = chunks_of(packing.sequence, 1, 2)
    assert chunks_of(packing.sequence, 1, 2) is chunks
    indices = [index for chunk in chunks.batches for index in chunk]
    assert {index.device.type for index in [*indices, chunks.order]} == {"meta"}
