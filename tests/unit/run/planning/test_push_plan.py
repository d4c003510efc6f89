"""The plan of a push: every element that is needed and not held moves once, and nothing else moves."""

import math
from collections import defaultdict
from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftmega.config import ParallelConfig
from rftmega.converters import table
from rftmega.core.shards import Box
from rftmega.model_providers.description import describe, layout_violations
from rftmega.run.planning.push_plan import Engines, placements
from rftmega.weights.engine_needs import needed_boxes
from rftmega.weights.plan import Balance

P = ParallelConfig
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SPARSE: dict[str, Any] = DENSE | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def planned(
    hf_config: dict[str, Any],
    parallel: ParallelConfig,
    world: int,
    engines: Engines,
    *,
    colocated: bool,
) -> Balance:
    plan = Balance()
    for _, tensor, needs in placements(
        table(hf_config), describe(hf_config), parallel, world, engines, colocated=colocated
    ):
        for transfer in plan.transfers(tensor, needs):
            assert transfer.source != transfer.target
    return plan


@pytest.mark.parametrize(
    ("hf_config", "parallel", "engines", "colocated", "separate"),
    [
        (DENSE, P(tensor=4, pipeline=2), Engines(8, 2), 57.3, 65.5),
        pytest.param(
            *(DENSE, P(tensor=4, pipeline=2), Engines(8, 8), 14.3, 16.4), marks=pytest.mark.ranks
        ),
        (DENSE, P(tensor=2), Engines(8, 2), 0.0, 65.5),
        pytest.param(*(DENSE, P(tensor=8), Engines(8, 8), 0.0, 16.4), marks=pytest.mark.ranks),
        pytest.param(
            *(SPARSE, P(tensor=2, sequence=True, pipeline=2, expert=4), Engines(8, 8), 53.3, 61.4),
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            SPARSE,
            P(tensor=4, sequence=True, expert=8),
            Engines(8, 8, spread_experts=True),
            2.4,
            61.4,
            marks=pytest.mark.ranks,
        ),
        (
            SPARSE,
            P(tensor=2, sequence=True, pipeline=2, expert=4),
            Engines(8, 4, spread_experts=True),
            62.7,
            122.3,
        ),
    ],
)
def test_gigabytes_are_those_of_an_independent_count(
    hf_config: dict[str, Any],
    parallel: ParallelConfig,
    engines: Engines,
    colocated: float,
    separate: float,
) -> None:
    """A brute-force count of intervals made before this code (the project's converter notes, 4.1)."""
    for together, wanted in ((True, colocated), (False, separate)):
        plan = planned(hf_config, parallel, 8, engines, colocated=together)
        assert round(plan.moved / 1e9, 1) == wanted


def test_sources_of_replicas_share_the_sending() -> None:
    plan = planned(DENSE, P(tensor=2), 16, Engines(4, 4), colocated=False)
    sent = [plan.sent[rank] for rank in range(16)]
    assert max(sent) < 1.1 * sum(sent) / 16


@pytest.mark.ranks
def test_a_model_of_671_billion_parameters_on_1024_and_256_ranks_is_planned() -> None:
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
    }
    hf_config = DENSE | latent | {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 64,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    }  # fmt: skip
    parallel = P(
        tensor=8, sequence=True, pipeline=16, expert=64, first_stage_layers=4, last_stage_layers=1
    )
    plan = planned(
        hf_config, parallel, 1024, Engines(256, 32, spread_experts=True), colocated=False
    )
    replicas = plan.moved / (2 * describe(hf_config).parameters)
    assert 8.0 < replicas < 8.6  # 8 engines; what is not sharded goes to all 32 ranks of each
    assert len(plan.received) == 256
    assert len(plan.sent) == 1024


@settings(deadline=None, max_examples=40)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    chunks=st.sampled_from([1, 2]),
    copies=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2]),
    engine=st.sampled_from([1, 2, 4]),
    spread=st.booleans(),
    colocated=st.booleans(),
    tied=st.booleans(),
    family=st.sampled_from(["qwen3", "qwen3_moe", "qwen2"]),
)
def test_what_is_held_and_what_arrives_is_exactly_what_is_needed(
    tensor: int, pipeline: int, chunks: int, copies: int, expert: int, engine: int, spread: bool, colocated: bool, tied: bool,
    family: str,
) -> None:  # fmt: skip
    """Moves numbers: no element arrives twice, none that is held, and the wanted slices come out."""
    hf_config = DENSE | {
        "model_type": family, "vocab_size": 131, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": tied,
    }  # fmt: skip
    if family == "qwen3_moe":
        hf_config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    else:
        expert, spread = 1, False
    if family == "qwen2":
        del hf_config["head_dim"]
    parallel = P(
        tensor=tensor,
        sequence=tensor > 1,
        pipeline=pipeline,
        virtual_pipeline=chunks if pipeline > 1 else 1,
        expert=expert,
    )
    model = describe(hf_config)
    assert not layout_violations(model, parallel)
    world = max(tensor, expert) * pipeline * copies
    ranks = world if colocated else 2 * engine
    if ranks % engine:
        return
    plan = Balance()
    engines = Engines(ranks, engine, spread)
    seen = 0
    for rule, tensor, needs in placements(
        table(hf_config), model, parallel, world, engines, colocated=colocated
    ):
        truth = [torch.arange(math.prod(shape)).view(shape) for shape in tensor.shapes]
        nothing = [torch.full_like(each, -1) for each in truth]
        held: dict[int, list[torch.Tensor]] = defaultdict(partial(deepcopy, nothing))
        buffers: dict[int, list[torch.Tensor]] = defaultdict(partial(deepcopy, nothing))
        for holding, holders in tensor.holders:
            for number, box in holding:
                for rank in holders:
                    cut(held[rank][number], box).copy_(cut(truth[number], box))
        for source, target, part in plan.transfers(tensor, needs):
            sent, got = cut(held[source][part.number], part.box), part.number
            assert (sent >= 0).all(), "sent what it does not hold"
            assert (cut(held[target][got], part.box) < 0).all(), "got what it holds"
            assert (cut(buffers[target][got], part.box) < 0).all(), "got it twice"
            cut(buffers[target][got], part.box).copy_(sent)
            assert part.bytes == sent.numel() * 2
        for target, needed in needs:
            for number, box in needed:
                found = torch.maximum(buffers[target][number], held[target][number])
                assert torch.equal(cut(found, box), cut(truth[number], box))
        assert needs, rule.megatron
        seen += 1
    assert seen > 4


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])  # 16: two ranks share a key-value head
def test_an_engine_needs_of_a_fused_tensor_what_it_needs_of_its_parts(ranks: int) -> None:
    apart = DENSE | {"model_type": "llama", "tie_word_embeddings": False}
    tables = table(apart | {"model_type": "phi3"}), table(apart)
    fused = 0
    for one, other in zip(*tables, strict=True):
        assert one.megatron == other.megatron
        fused += bool(one.fused)
        begins = [0, *accumulate(tensor.shape[0] for tensor in other.hf)]
        for rank in range(ranks):
            wanted = {
                (begins[part] + row, columns)
                for part, ((start, stop), *columns_of) in needed_boxes(other, rank, ranks)
                for row in range(start, stop)
                for columns in [tuple(columns_of)]
            }
            found = {
                (row, columns)
                for _, ((start, stop), *columns_of) in needed_boxes(one, rank, ranks)
                for row in range(start, stop)
                for columns in [tuple(columns_of)]
            }
            assert found == wanted
    assert fused == 2
