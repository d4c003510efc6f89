"""Every family at every layout, on fake ranks: HF -> shards -> HF, without a process or a module."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.converters import Rule, assemble, shard, table
from rftmega.model_providers.description import ModelDescription, describe, layout_violations
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.placement import Holding, holdings
from rftmega.models.hf.stacked_files import open_folder
from tests.tiny_models import SHAPE, VARIANTS, save_tiny

Key = tuple[str, int | None, int | None]
SMALL = {
    "hidden_size": 8,
    "vocab_size": 13,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 6,
}


def places(parallel: ParallelConfig) -> Iterator[dict[str, int]]:
    """Every distinct place in a replica; dense tensors have tensor-parallel places, experts their
    own.
    """
    for stage, dense, expert, inner in product(
        range(parallel.pipeline),
        range(parallel.tensor),
        range(parallel.expert),
        range(parallel.expert_tensor),
    ):
        yield {
            "stage": stage,
            "tensor_rank": dense,
            "expert_rank": expert,
            "expert_tensor_rank": inner,
        }


class FakeRanks:
    """A folder's tensors, cut as the ranks of any layout would hold them."""

    def __init__(self, folder: Path):
        hf_config = read_hf_config(folder)
        files = open_folder(folder, hf_config)
        self.disk = {name: files.whole(name, files.shape_of(name)) for name in files.names}
        self.model: ModelDescription = describe(hf_config)
        self.rules: list[Rule] = table(hf_config)

    def cut(
        self, disk: dict[str, Tensor], parallel: ParallelConfig
    ) -> dict[Key, dict[int, tuple[Holding, Tensor]]]:
        """Megatron tensor -> shard number -> what the rank there holds; replicas must agree about
        the number of shards.
        """
        held: dict[Key, dict[int, tuple[Holding, Tensor]]] = defaultdict(dict)
        for place in places(parallel):
            for item in holdings(self.rules, self.model, parallel, **place):
                key = (item.rule.megatron[0], item.layer, item.expert)
                if item.rank not in held[key]:
                    parts = [disk[name] for name in item.rule.hf_names(item.layer, item.expert)]
                    held[key][item.rank] = item, shard(item.rule, parts, item.rank, item.ranks)
        return held

    def back(self, held: dict[Key, dict[int, tuple[Holding, Tensor]]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for shards in held.values():
            item, _ = shards[0]
            if not item.rule.exported:
                continue
            assert sorted(shards) == list(range(item.ranks))
            whole = assemble(item.rule, [shards[rank][1] for rank in range(item.ranks)])
            for name, tensor in zip(
                item.rule.hf_names(item.layer, item.expert), whole, strict=True
            ):
                assert name not in found, f"{name} came twice"
                found[name] = tensor
        return found


def layouts(model: ModelDescription) -> list[ParallelConfig]:
    """All that the shape admits."""
    found = [
        ParallelConfig(
            tensor=t, sequence=t > 1, pipeline=p, virtual_pipeline=v, expert=e, expert_tensor=x
        )
        for t, p, v, e, x in product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2))
        if v == 1 or p > 1
    ]
    return [layout for layout in found if not layout_violations(model, layout)]


def digest(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors.items()
    }


def small(folder: Path, variant: str, **changes: Any) -> FakeRanks:
    _, own = VARIANTS[variant]
    layers = changes.get("num_hidden_layers", SMALL["num_hidden_layers"])
    window = (
        {"max_window_layers": layers}
        if "max_window_layers" in own or variant.startswith("qwen2")
        else {}
    )
    size = {name: value for name, value in SMALL.items() if name in SHAPE or name in own}
    if "short_factor" in own.get("rope_parameters", {}):  # which fits one size of heads
        del size["hidden_size"]
    if kinds := own.get("layer_types"):
        size["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    return FakeRanks(save_tiny(folder, variant, **(size | window | changes)))


UNLIKE = ("qwen2-tied", "qwen2-moe", "deepseek-v3", "glm4-moe", "phi3")  # they reach the most code


@pytest.mark.parametrize(
    "variant",
    [pytest.param(x, marks=[] if x in UNLIKE else [pytest.mark.ranks]) for x in VARIANTS],
)
def test_every_layout_gives_every_byte_back(variant: str, tmp_path: Path) -> None:
    ranks = small(tmp_path, variant)
    wanted = digest(ranks.disk)
    tried = layouts(ranks.model)
    assert len(tried) >= (36 if ranks.model.biased else 40 if ranks.model.experts else 12)
    for parallel in tried:
        assert digest(ranks.back(ranks.cut(ranks.disk, parallel))) == wanted, parallel


@pytest.mark.parametrize(
    "variant", ["qwen2-tied", pytest.param("deepseek-v3", marks=pytest.mark.ranks)]
)
def test_shards_of_one_layout_become_those_of_another(variant: str, tmp_path: Path) -> None:
    ranks = small(tmp_path, variant)
    tried = layouts(ranks.model)
    for first, second in zip(tried, reversed(tried), strict=True):
        direct = ranks.cut(ranks.disk, second)
        through = ranks.cut(ranks.back(ranks.cut(ranks.disk, first)), second)
        assert direct.keys() == through.keys()
        assert all(
            torch.equal(direct[key][n][1], through[key][n][1])
            for key in direct
            for n in direct[key]
        ), (first, second)


@settings(deadline=None, max_examples=15)
@given(
    variant=st.sampled_from(["llama", "qwen2-tied", "qwen3", "mixtral"]),
    groups=st.sampled_from([1, 2, 4]),
    queries=st.integers(1, 3),
    head=st.sampled_from([2, 6]),
    hidden=st.sampled_from([2, 4, 6]),  # a head
    ffn=st.sampled_from([4, 8, 12]),
    vocabulary=st.integers(3, 30),
    layers=st.integers(1, 4),
)
def test_random_shapes_come_back_at_every_layout_that_they_admit(
    variant: str,
    groups: int,
    queries: int,
    head: int,
    hidden: int,
    ffn: int,
    vocabulary: int,
    layers: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    heads = groups * queries
    own_head = {} if variant == "qwen2-tied" else {"head_dim": head}
    ranks = small(
        tmp_path_factory.mktemp("shape"),
        variant,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        hidden_size=heads * hidden,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        **own_head,
    )
    wanted = digest(ranks.disk)
    for parallel in layouts(ranks.model):
        assert digest(ranks.back(ranks.cut(ranks.disk, parallel))) == wanted, parallel
