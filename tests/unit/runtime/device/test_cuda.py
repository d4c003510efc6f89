"""CUDA's half of the device over an imitation of torch.cuda: pinned memory, streams, events."""

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch

from rftmega.runtime.device import CUDA, hardware
from rftmega.runtime.device.spans import SpanRecorder
from tests.imitation_cuda import ImitationCUDA, imitated


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImitationCUDA]:
    with imitated(monkeypatch) as found:
        yield found


@pytest.mark.parametrize("size", [1, 4096, 5_000_001])
def test_pinned_memory_is_what_was_asked_for_and_goes_with_its_last_tensor(
    cuda: ImitationCUDA, size: int
) -> None:
    buffer = CUDA(cuda).host_buffer(size, torch.float32)
    assert (buffer.shape, buffer.dtype, cuda.pinned) == ((size,), torch.float32, 4 * size)
    part = buffer[-1:]
    del buffer
    gc.collect()
    assert cuda.pinned == 4 * size
    assert part.item() == 0
    del part
    gc.collect()
    assert cuda.pinned == 0


def test_no_bytes_need_no_pinned_memory(cuda: ImitationCUDA) -> None:
    assert CUDA(cuda).host_buffer(0, torch.uint8).shape == (0,)
    assert cuda.ranges == {}


def test_memory_that_the_driver_refuses_is_told_with_its_size(
    cuda: ImitationCUDA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *asked: 2)
    with pytest.raises(
        MemoryError, match=r"4,096 bytes of host memory can't be pinned: cudaHostRegister says 2"
    ):
        CUDA(cuda).host_buffer(4096, torch.uint8)


def test_a_copy_aside_takes_what_was_there_when_it_was_asked_for_once_it_is_waited_for(
    cuda: ImitationCUDA,
) -> None:
    accelerator = CUDA(cuda)
    for wait in ("wait", "hold"):
        source, target = torch.ones(5), accelerator.host_buffer(5, torch.float32)
        copy = accelerator.copy_aside([(source, target)])
        torch.zeros(3).copy_(torch.ones(3))  # the computation goes on
        assert target.tolist() == [0.0] * 5, "nobody waits for it"
        getattr(copy, wait)()
        source.zero_()
        assert target.tolist() == [1.0] * 5


def test_moments_are_events_of_the_stream(cuda: ImitationCUDA) -> None:
    accelerator = CUDA(cuda)
    begin = accelerator.moment()
    end = accelerator.moment()
    assert accelerator.seconds(begin, end) == 0.001


def test_a_device_is_described_with_its_driver_and_libraries(
    cuda: ImitationCUDA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hardware, "found", lambda: hardware.Hardware("580.65.06", "13.0", usable=True)
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = CUDA(cuda).described()
    assert said == "Imitation H100, 80 GB; driver 580.65.06, CUDA 13.0, NCCL 2.28.3"


def test_what_the_device_computes_is_measured_by_its_events_and_recorded_once_it_is_done(
    cuda: ImitationCUDA,
) -> None:
    recorder = SpanRecorder()
    recorder.measuring = True
    for _ in range(2):
        recorder.start("forward")
        cuda.ticks += 3
        recorder.finish("forward")
    # 1 ms a tick: 3, and one of the second event
    assert recorder.take() == pytest.approx({"forward": 0.008})
    assert recorder.take() == {}
    recorder.record()
    recorder.start("backward")
    recorder.finish("backward")
    (span,) = recorder.stop()
    assert span.name == "backward"
    assert cuda.waited == 2, (
        "a stretch begins and ends when the device has done what it was asked before"
    )


def test_a_phases_most_is_of_all_its_stretches(cuda: ImitationCUDA) -> None:
    accelerator = CUDA(cuda)
    for most in (500, 900, 300):
        accelerator.forget_peak()
        cuda.most = most
    assert accelerator.peak_bytes() == 900
    accelerator.forget_peak()
    cuda.most = 200
    assert accelerator.peak_bytes() == 200
    assert accelerator.memory()["most_allocated"] == 200


def test_an_engine_that_sleeps_is_not_in_the_most_of_a_phase(
    cuda: ImitationCUDA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch counts its tensors as before, though their memory is gone."""
    accelerator, free = CUDA(cuda), 50
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (free, 100))
    cuda.most = 45  # 40 of them the engine's
    assert accelerator.peak_bytes() == 45
    accelerator.forget_peak()
    cuda.most = 43
    with accelerator.remapping():
        free = 90
    assert accelerator.peak_bytes() == 43, "the engine was awake in this phase"
    accelerator.forget_peak()
    cuda.most = 47
    assert accelerator.peak_bytes() == 7
    with accelerator.remapping():
        free = 75  # its weights come back, its cache does not
    cuda.most = 46
    assert accelerator.peak_bytes() == 21
    with accelerator.remapping():
        free = 50
    cuda.most = 41
    assert accelerator.peak_bytes() == 41
    with accelerator.remapping():
        free = 90
    accelerator.nothing_remapped()  # the engine ends asleep, and another run begins
    cuda.most = 12
    assert accelerator.peak_bytes() == 12


def test_waits_for_the_device_are_counted_with_their_places_and_the_mode_is_as_before(
    cuda: ImitationCUDA,
) -> None:
    accelerator, tensor = CUDA(cuda), torch.ones(())
    cuda.read(tensor)
    with accelerator.waits() as places:
        for _ in range(2):
            cuda.read(tensor)
        warnings.warn("of another kind", stacklevel=1)
    assert places is not None and len(set(places)) == 1
    assert [place.rpartition(":")[0] for place in places] == [__file__] * 2
    assert cuda.sync_mode == 0


def test_work_that_fails_leaves_the_mode_as_it_was(cuda: ImitationCUDA) -> None:
    def failing() -> None:
        with CUDA(cuda).waits():
            assert cuda.sync_mode == 1
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        failing()
    assert cuda.sync_mode == 0


def test_room_is_what_the_driver_calls_free_once_the_cache_is_given_back(
    cuda: ImitationCUDA,
) -> None:
    assert CUDA(cuda).room() == 50_000_000_000
    assert cuda.emptied == 1
