"""What all processes tell each other of their clocks and of their work."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.monitoring.performance.throughput import Throughput, compared
from rftmega.runtime.device.spans import recorder
from rftmega.runtime.parallel.clocks import clock_offsets
from tests.ranks import run_ranks

AHEAD = (0, 5_000_000_000, -3_000_000_000)  # nanoseconds


def _offsets(world: Any) -> list[tuple[int, int]]:
    return clock_offsets(lambda: time.perf_counter_ns() + AHEAD[world.rank])


def test_offsets_of_clocks_are_found_within_the_bound_that_is_given() -> None:
    found = run_ranks(3, _offsets)
    assert found[0] == found[1] == found[2]
    for (ahead, error), wanted in zip(found[0], AHEAD, strict=True):
        assert abs(ahead - wanted) <= error < 1_000_000_000


def _one_works_more(world: Any) -> dict[str, float]:
    """Two phases; the second process generates for 3 s, the first for 1 s, and waits for 2 s of its
    3.5 s of loading.
    """
    measures = Throughput(peak_tflops=0.5)
    # half of it before a resume
    trainer = SimpleNamespace(
        step=0,
        counts={
            "tokens": 80,
            "computed": 70,
            "slots": 100,
            "bubble": 3,
            "ideal": 8,
            "slowest": 5,
            "balanced": 4,
        },
    )
    recorder.count("generate", 77.0)  # of an evaluation before the first step
    measures.on_start(trainer, {})
    recorder.count("generate", 1.0 + 2.0 * world.rank)
    measures.on_phase(trainer, "rollout", 4.0)
    recorder.count("load weights", 3.5)
    recorder.count("receive weights", 2.0 - world.rank)
    measures.on_phase(trainer, "push", 4.0)
    counts = {
        "tokens": 40,
        "computed": 30,
        "slots": 60,
        "flops": 6e12,
        "bubble": 1,
        "ideal": 4,
        "slowest": 15.0,
        "balanced": 13.0,
        "forward": 2.0,
        "backward": 1.0,
        "schedule": 5.0,
    }
    for name, amount in (counts | {"all-grads-sync": 1.0}).items():
        recorder.count(name, amount)
    measures.on_phase(trainer, "update", 4.0)
    metrics = {"generated_tokens": 160.0}
    measures.on_step(trainer, metrics)
    measures.on_end(trainer)
    return metrics


def test_the_slowest_process_of_each_phase_is_named_and_all_know_it() -> None:
    one, other = run_ranks(2, _one_works_more)
    one, other = (
        {name: value for name, value in found.items() if "mib" not in name}
        for found in (one, other)
    )
    assert one == pytest.approx(other)
    assert one == pytest.approx(
        {
            "generated_tokens": 160.0,
            "work_rollout": 2.0, "work_rollout_max": 3.0, "work_rollout_median": 1.0, "work_rollout_slowest": 1.0,
            "work_push": 2.0, "work_push_max": 2.5, "work_push_median": 1.5, "work_push_slowest": 1.0,
            "work_update": 3.0, "work_update_max": 3.0, "work_update_median": 3.0, "work_update_slowest": 0.0,
            "tokens_per_second_rollout": 20.0,  # 160 in 4 s on 2 devices
            "tokens_per_second_update": 10.0,
            "tflops_update": 0.75,
            "mfu_update": 1.5,
            "padding": 0.3,
            "shared_tokens": 0.125,
            "data_parallel_idle": 0.2,
            "pipeline_bubble": 3 / 8,
            "pipeline_idle": 0.25,  # of 5 s less 1 s of reduction, 3 s were computed
        }
    )  # fmt: skip


def test_the_most_memory_of_any_process_is_the_phases() -> None:
    found = compared(["score"], torch.tensor([[[1.0, 300.0, 0.0]], [[1.0, 200.0, 0.0]]]))
    assert found["memory_mib_score"] == 300.0
