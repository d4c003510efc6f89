"""What is said about a layout before anything is built is what Megatron builds."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.config import ParallelConfig
from rftmega.converters import table
from rftmega.model_providers.description import describe, stage_layers
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.placement import holdings
from rftmega.runtime.parallel.layout import replicas
from tests.layouts import build_manager
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
CASES = [  # (model, layers, processes, layout)
    pytest.param("qwen2-tied", 4, 4, P(tensor=2, pipeline=2), marks=pytest.mark.ranks),
    pytest.param("qwen3", 8, 2, P(pipeline=2, virtual_pipeline=4), marks=pytest.mark.ranks),
    pytest.param(
        "qwen3",
        6,
        3,
        P(pipeline=3, first_stage_layers=1, last_stage_layers=1),
        marks=pytest.mark.ranks,
    ),
    ("qwen3", 8, 3, P(pipeline=3, virtual_pipeline=2, first_stage_layers=2, last_stage_layers=2)),
    pytest.param("qwen3", 5, 2, P(pipeline=2, last_stage_layers=2), marks=pytest.mark.ranks),
    pytest.param("qwen3", 4, 8, P(tensor=2, context=2, pipeline=2), marks=pytest.mark.ranks),
    ("qwen3-moe", 4, 4, P(tensor=2, sequence=True, expert=2, expert_tensor=2)),
    pytest.param("qwen3-moe", 4, 8, P(pipeline=2, expert=4), marks=pytest.mark.ranks),
    pytest.param("qwen3-moe", 4, 4, P(tensor=4, sequence=True, expert=2), marks=pytest.mark.ranks),
    ("deepseek-v3", 4, 4, P(tensor=2, sequence=True, pipeline=2, expert=2)),
    pytest.param(
        "qwen2-moe", 4, 2, P(tensor=2, sequence=True, expert_tensor=2), marks=pytest.mark.ranks
    ),
]


def built_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    manager = build_manager(folder, parallel)
    topology = manager.topology
    layers = [
        [layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in manager.chunks
    ]
    keys = [
        (item.rule.megatron[0], item.layer, item.expert, item.rank, item.ranks)
        for item in manager.bound
    ]
    ranks = dist.get_process_group_ranks(topology.replica_group)
    place = {
        "stage": topology.pipeline_rank,
        "tensor_rank": topology.tensor_rank,
        "expert_rank": topology.expert_rank,
        "expert_tensor_rank": topology.expert_tensor_rank,
    }
    return layers, keys, ranks, place


@pytest.mark.parametrize(("variant", "layers", "processes", "parallel"), CASES)
def test_layers_parameters_and_replicas(
    variant: str, layers: int, processes: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    more = {"max_window_layers": layers} if variant.startswith("qwen") else {}
    folder = save_tiny(tmp_path, variant, num_hidden_layers=layers, **more)
    hf_config = read_hf_config(folder)
    model, rules = describe(hf_config), table(hf_config)
    built = run_ranks(processes, built_body, folder, parallel)
    planned = stage_layers(layers, parallel)
    for rank, (found, keys, group, place) in enumerate(built):
        assert found == [list(chunk) for chunk in planned[place["stage"]]]
        expected = holdings(rules, model, parallel, **place)
        assert sorted(map(str, keys)) == sorted(
            str((item.rule.megatron[0], *item[1:])) for item in expected
        )
        assert rank in group
    groups = {tuple(group) for _, _, group, _ in built}
    assert groups == {tuple(group) for group in replicas(processes, parallel)}
    everything = {key for _, keys, _, _ in built for key in keys}
    for group in groups:  # each holds every shard of every parameter
        assert {key for rank in group for key in built[rank][1]} == everything
