"""What of a phase's memory is told where it holds the device several times in a step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rftmega.config import ModelConfig, ParallelConfig, RunConfig
from rftmega.config.options.teachers import Teacher
from rftmega.run.placement.phase_memory import MIB, Memory, predicted
from rftmega.runtime import device
from rftmega.runtime.device import CUDA
from rftmega.runtime.parallel.process_group import World
from tests.tiny_models import save_tiny


class Counters:
    """CUDA's, of which a stretch of work sets the peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def work(self, mib: int) -> None:
        self.peak = max(self.peak, mib * MIB)

    def reset(self) -> None:
        self.peak = self.now


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    found, cuda = Counters(), CUDA()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: found.peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: found.now)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    monkeypatch.setattr(device, "current", lambda: cuda)
    return found


def test_the_most_of_a_phase_is_that_of_all_its_holds_and_of_no_other_phases(
    counters: Counters,
) -> None:
    memory, told = Memory({}, {}), []
    for step in (1, 2):
        for phase, holds in (("score", (5 * step, 9, 8)), ("update", (7, 2))):
            for mib in holds:
                memory.end()
                memory.begin(phase)
                counters.work(mib)
            told.append(device.current().peak_bytes() / MIB)
    memory.end()
    assert told == [9, 7, 10, 7]
    found = memory.take()
    assert (
        found["memory_score_most_allocated_mib"],
        found["memory_update_most_allocated_mib"],
    ) == (10, 7)
    assert memory.take() == {}, "a step tells what it measured, not what one before did"


def test_a_teacher_with_stages_is_predicted_beside_a_policy_without(tmp_path: Path) -> None:
    """The second stage has three of four layers."""
    folder = str(save_tiny(tmp_path, "qwen3", num_hidden_layers=4))
    stages = ParallelConfig(pipeline=2, first_stage_layers=1)
    config = RunConfig(backend="fsdp", model=ModelConfig(path=folder, dtype="float32"))
    config.algorithm.teachers = [Teacher(path=folder, backend="megatron", parallel=stages)]
    cpu = torch.device("cpu")
    first, second = (
        predicted(config, World(rank, 2, rank, 2, cpu))["score_teacher"]["parameters"]
        for rank in range(2)
    )
    tensors = load_file(tmp_path / "model.safetensors").values()
    assert first + second == sum(tensor.nbytes for tensor in tensors)
    assert second > 1.5 * first
