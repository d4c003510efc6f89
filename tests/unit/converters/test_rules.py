"""HF -> shards -> HF, on fake ranks: no processes, no Megatron."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftmega.converters import (
    QKV,
    Column,
    HFTensor,
    Replicated,
    Row,
    Rule,
    Vocabulary,
    assemble,
    shard,
    shard_shape,
    table,
)
from rftmega.core.errors import CheckpointError, WeightMismatch


def rule_of(kind: str, shapes: list[tuple[int, ...]], **settings: Any) -> Rule:
    kinds = {
        "replicated": Replicated,
        "column": Column,
        "row": Row,
        "vocabulary": Vocabulary,
        "qkv": QKV,
    }
    return kinds[kind](
        ("m",), tuple(HFTensor(f"hf{i}", shape) for i, shape in enumerate(shapes)), **settings
    )


def distinct(rule: Rule) -> list[Tensor]:
    """HF tensors in which no two elements are equal."""
    parts, start = [], 1
    for tensor in rule.hf:
        size = torch.Size(tensor.shape).numel()
        parts.append(torch.arange(start, start + size, dtype=torch.float64).view(tensor.shape))
        start += size
    return parts


def round_trip(rule: Rule, ranks: int) -> None:
    parts = distinct(rule)
    shards = [shard(rule, parts, rank, ranks) for rank in range(ranks)]
    for rank, held in enumerate(shards):
        assert held.shape == shard_shape(rule, rank, ranks)
    for back, part in zip(assemble(rule, shards), parts, strict=True):
        assert torch.equal(back, part)
    if not isinstance(rule, Replicated):  # nothing is held twice, nothing is lost
        held = torch.cat([x.flatten() for x in shards])
        assert sorted(held[held > 0].tolist()) == sorted(
            torch.cat([p.flatten() for p in parts]).tolist()
        )


@settings(deadline=None, max_examples=300)
@given(
    ranks=st.sampled_from([1, 2, 4, 8]),
    block=st.integers(1, 4),
    other=st.integers(1, 5),
    vocabulary=st.integers(1, 40),
    groups=st.sampled_from([1, 2, 4, 8]),
    queries=st.integers(1, 4),
    head=st.sampled_from([2, 8]),
    bias=st.booleans(),
)
def test_every_kind_of_rule_comes_back_byte_for_byte(
    ranks: int,
    block: int,
    other: int,
    vocabulary: int,
    groups: int,
    queries: int,
    head: int,
    bias: bool,
) -> None:
    size = ranks * block
    round_trip(rule_of("replicated", [(size, other)]), ranks)
    round_trip(rule_of("column", [(size, other)]), ranks)
    round_trip(rule_of("column", [(size, other), (size, other)]), ranks)  # gate and up
    round_trip(rule_of("row", [(other, size)]), ranks)
    round_trip(rule_of("vocabulary", [(vocabulary, other)]), ranks)
    inputs = () if bias else (other,)
    rows = [groups * queries * head, groups * head, groups * head]
    round_trip(rule_of("column", [(2 * size, *inputs)], fused=(size, size)), ranks)
    if sum(rows) % ranks == 0:
        fused = rule_of("qkv", [(sum(rows), *inputs)], groups=groups, fused=tuple(rows))
        round_trip(fused, ranks)
        round_trip(rule_of("qkv", [(row, *inputs) for row in rows], groups=groups), ranks)


def test_qkv_is_interleaved_by_query_group_as_megatron_reads_it() -> None:
    rule = rule_of("qkv", [(8, 1), (4, 1), (4, 1)], groups=2)  # 4 heads of 2, 2 groups
    parts = [
        torch.arange(start, start + rows)[:, None] for start, rows in ((0, 8), (100, 4), (200, 4))
    ]
    whole = shard(rule, parts, 0, 1)[:, 0].tolist()
    assert whole == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_a_shard_of_gate_and_up_is_a_block_of_each() -> None:
    rule = rule_of("column", [(4,), (4,)])
    parts = [torch.arange(4.0), torch.arange(10.0, 14.0)]
    assert shard(rule, parts, 1, 2).tolist() == [2, 3, 12, 13]


@settings(deadline=None, max_examples=50)
@given(ranks=st.sampled_from([1, 2, 4]), queries=st.integers(1, 3), bias=st.booleans())
def test_a_shard_of_a_fused_tensor_is_that_of_its_parts(
    ranks: int, queries: int, bias: bool
) -> None:
    inputs = () if bias else (3,)
    for kind, rows, more in (
        ("qkv", [8 * queries, 8, 8], {"groups": 2}),
        ("column", [12, 12], {}),
    ):
        apart = rule_of(kind, [(row, *inputs) for row in rows], **more)
        fused = rule_of(kind, [(sum(rows), *inputs)], fused=tuple(rows), **more)
        parts = distinct(apart)
        if sum(rows) % ranks:
            continue
        for rank in range(ranks):
            assert torch.equal(
                shard(fused, [torch.cat(parts)], rank, ranks), shard(apart, parts, rank, ranks)
            )


def test_vocabulary_padding_is_zero_rows_at_the_end() -> None:
    rule = rule_of("vocabulary", [(5, 1)])
    parts = [torch.arange(1.0, 6.0)[:, None]]
    assert [shard(rule, parts, rank, 4)[:, 0].tolist() for rank in range(4)] == [
        [1, 2],
        [3, 4],
        [5, 0],
        [0, 0],
    ]


@pytest.mark.parametrize(
    "rule",
    [
        rule_of("column", [(6, 2)]),
        rule_of("row", [(2, 6)]),
        rule_of("qkv", [(2,), (2,), (2,)], groups=1),
    ],
)
def test_what_ranks_cannot_share_equally_is_refused_by_name(rule: Rule) -> None:
    with pytest.raises(WeightMismatch, match="hf0"):
        rule.segments(0, 4)


def test_a_family_without_a_table_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="gpt_bigcode"):
        table({"model_type": "gpt_bigcode"})
