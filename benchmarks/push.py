"""Compares a planned push with one that gathers every tensor on every process, as most trainers do:
bytes and time in one run.
"""

from pathlib import Path
from typing import Any

from benchmarks.models import save_model
from benchmarks.timing import compare
from rftmega.config import ParallelConfig
from rftmega.weights import EngineWeights, Exporter
from tests.block_engine import BlockEngine
from tests.layouts import build_manager
from tests.ranks import run_ranks

P = ParallelConfig
BUCKET_BYTES = 16 * 2**20
LAYOUTS = {
    "TP2 x PP2 to TP1": (4, P(tensor=2, pipeline=2), 1),
    "TP2 x PP2 to TP2": (4, P(tensor=2, pipeline=2), 2),
    "TP2 x DP2 to TP4": (4, P(tensor=2), 4),
    "PP4 to TP2": (4, P(pipeline=4), 2),
    "TP4 x PP2 to TP2": (8, P(tensor=4, pipeline=2), 2),
    "TP2 x PP2 x DP2 to TP4": (8, P(tensor=2, pipeline=2), 4),
}
"""processes, trainer's layout, ranks an engine"""


def body(world: Any, folder: Path, parallel: ParallelConfig, ranks: int) -> dict[str, float]:
    manager = build_manager(folder, parallel)
    engine = BlockEngine(world.rank % ranks, ranks, kv_heads=4)
    planned = EngineWeights(manager.shards(), engine, bucket_bytes=BUCKET_BYTES)
    everything = Exporter(
        manager.shards(), manager.topology.replica_group, bucket_bytes=BUCKET_BYTES
    )
    found = compare(
        lambda: planned.push(version=1),
        lambda: engine.load_weights(everything, version=1),
        rounds=5,
    )
    replica = everything.group.size()
    moved = planned.push(version=2)["push_bytes"]
    return {
        "planned_mib": moved / 2**20,
        "least_mib": planned.least_bytes / 2**20,
        "everything_mib": everything.total_bytes * (replica - 1) * (world.size // replica) / 2**20,
        "planned_seconds": found.ours,
        "everything_seconds": found.theirs,
        "speedup": found.ratio,
    }


def planned_against_everything(folder: Path) -> dict[str, float]:
    save_model(
        folder,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1536,
    )
    found = {}
    for name, (processes, parallel, ranks) in LAYOUTS.items():
        for figure, value in run_ranks(processes, body, folder, parallel, ranks, timeout=600)[
            0
        ].items():
            found[f"{name}: {figure}"] = value
    return found
