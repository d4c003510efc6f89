"""What of a phase's memory is told where it holds the device several times in a step."""

import pytest
import torch

from rftmega.run.placement.phase_memory import MIB, Memory
from rftmega.runtime import device
from rftmega.runtime.device import CUDA


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
