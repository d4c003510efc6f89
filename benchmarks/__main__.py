"""Runs every benchmark, prints one table and writes runs/bench.json.

Results are more precise on an idle machine.
"""

import json
import sys
import tempfile
from pathlib import Path

import rftmega.runtime.device.before_megatron  # noqa: F401

# isort: split
from tqdm import tqdm

from benchmarks import (
    against_trl,
    asynchronous,
    balance,
    bubble,
    checkpoints,
    conversion,
    data_plane,
    divergences,
    log_probs,
    machine,
    moe,
    offload,
    push,
    real_servers,
    replayed_routes,
    rollouts,
    server_requests,
    sharded,
    shared_beginnings,
    steps,
    turns,
)

# name -> (benchmark, figure with a target, the target)
BENCHMARKS = {
    "packed against padded step": (steps.packed_against_padded, "share_of_ideal", "at least 0.85"),
    "step against transformers": (steps.against_transformers, "times_theirs", "at most 1.10"),
    "FSDP's step against transformers": (
        sharded.against_transformers,
        "times_theirs",
        "at most 1.10",
    ),
    "FSDP's step against fully_shard, 4 processes": (
        sharded.against_fully_shard,
        "times_theirs",
        "at most 1.05",
    ),
    "idle processes": (
        balance.idle_shares,
        "fsdp: idle",
        "at most 0.05",
    ),
    "idle processes, simulated": (
        balance.simulated_shares,
        "1024 ranks, in every micro-batch: idle",
        "at most 0.05",
    ),
    "step against TRL": (against_trl.step, "ours_over_trl", "at most 1"),
    "pretrained step against TRL": (
        against_trl.pretrained,
        "one process: times_as_fast",
        "at least 2",
    ),
    "log-probs by the update's own forward pass": (
        steps.late_against_early_scoring,
        "late_over_early",
        "below 1",
    ),
    "rows that begin alike": (
        shared_beginnings.against_separate,
        "megatron, prompt of 1024: share of the bound",
        "at least 0.85",
    ),
    "fused against dense log-probs": (log_probs.fused_against_dense, "memory_ratio", ""),
    "chunked against dense divergences": (divergences.chunked_against_dense, "memory_ratio", ""),
    "pipeline bubble": (bubble.of_pipelines, "", "counted = formula"),
    "conversion of 2 billion parameters": (
        conversion.both_ways,
        "slower_over_copy_speed",
        "at least 0.5",
    ),
    "push as planned against everything": (push.planned_against_everything, "", "planned = least"),
    "push of a mixture": (moe.many_tensors, "plain parameters: push_us_a_tensor", "at most 5"),
    "experts' routes replayed": (
        replayed_routes.with_and_without,
        "gap replayed over own",
        "below 1",
    ),
    "training checkpoint against dd": (checkpoints.speeds, "slower_over_dd", "at least 0.5"),
    "training beside a save": (checkpoints.beside, "steps_beside_over_plain", "at most 1.10"),
    "engines that run dry": (rollouts.running_dry, "", ""),
    "rollouts in an environment": (
        rollouts.through_an_environment,
        "4 tokens: environment_over_engine",
        "at most 1.03",
    ),
    "rollouts that wait for tools": (
        turns.waiting_for_tools,
        "200 ms a step, 4 rollouts a place: idle places",
        "below 0.1",
    ),
    "environment of tools against a plain loop": (
        turns.tools_against_a_plain_loop,
        "100 tokens: environment_over_plain",
        "at least 0.95",
    ),
    "requests to a server": (
        server_requests.against_in_process,
        "server_over_in_process",
        "at most 2",
    ),
    "asynchronous steps on a real server": (
        real_servers.against_synchronous,
        "staleness 2: times as fast",
        "",
    ),
    "asynchronous against synchronous steps": (
        asynchronous.against_synchronous,
        "staleness 2: times as fast",
        "at least 1.6",
    ),
    "one copy of a rollout a host": (
        data_plane.one_copy_a_host,
        "8k: held_over_a_copy_a_process",
        "at most 0.2",
    ),
    "Adam on the host": (offload.adam_on_the_host, "step_over_copies", ""),
    "offload against copy": (offload.against_copy, "off_over_copy", "at least 0.7"),
}


def main() -> None:
    wanted = sys.argv[1:] or list(BENCHMARKS)
    if unknown := [name for name in wanted if name not in BENCHMARKS]:
        sys.exit(f"error: there is no benchmark {unknown[0]!r}; these are: {', '.join(BENCHMARKS)}")
    measured_on = machine.here()
    found = {}
    target = Path("runs")
    target.mkdir(exist_ok=True)
    sys.stdout.write("| benchmark | figure | value | asked for |\n|---|---|---|---|\n")
    for name in tqdm(wanted, unit="benchmark", file=sys.stderr):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = BENCHMARKS[name][0](Path(folder))
        for figure, value in found[name].items():
            bound = BENCHMARKS[name][2] if figure == BENCHMARKS[name][1] else ""
            sys.stdout.write(f"| {name} | {figure} | {value:.4g} | {bound} |\n")
        sys.stdout.flush()  # keeps the results if a later benchmark fails
        (target / "bench.json").write_text(
            json.dumps({"machine": measured_on, "rows": found}, indent=1)
        )


if __name__ == "__main__":
    main()
