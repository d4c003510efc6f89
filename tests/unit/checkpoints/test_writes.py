"""A process that is killed in the middle of a write: what had the name before has it still, whole."""

import io
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from rftmega.checkpoints.distributed import (
    file_bytes,
    finish,
    write_json,
    write_manifest,
    write_pieces,
)
from rftmega.checkpoints.reader import MANIFEST, read_manifest
from rftmega.checkpoints.retention import LATEST, point_to
from rftmega.checkpoints.snapshot import Snapshot
from rftmega.checkpoints.training_files import write_rank, write_whole
from rftmega.models.hf.hf_folder import (
    PlannedTensor,
    _Summed,
    write_bytes,
    write_index,
    write_shard,
)
from rftmega.monitoring.observers.metric_writers import JSONLines
from rftmega.monitoring.observers.trajectories import write as write_trajectories
from rftmega.monitoring.performance.timeline import write as write_timeline

Write = Callable[[Path, int], object]
LONG = 5000


def pieces(number: int) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    return [("weights", (0,), torch.arange(LONG) + number)]


def shard(folder: Path, number: int) -> None:
    tensor = torch.arange(LONG) + number
    write_shard(
        folder / "model.safetensors",
        [PlannedTensor("weights", tensor.dtype, tensor.shape)],
        iter([("weights", tensor)]),
    )


def rank(folder: Path, number: int) -> None:
    snapshot = Snapshot(pieces(number), {"weights": (LONG,)})
    write_rank(folder, 0, snapshot, {"seed": [number] * LONG}, None, lambda seconds: None)


def metrics(folder: Path, number: int) -> None:
    """A resumed run's, which writes down again what it keeps."""
    if not (folder / "metrics.jsonl").exists():
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step}) + "\n" for step in range(LONG))
        )
    writer = JSONLines(folder / "metrics.jsonl")
    writer.on_start(SimpleNamespace(step=LONG, resumed=True), {})
    writer.on_end(None)


WRITES: dict[str, tuple[Write, str]] = {
    "pieces": (lambda f, n: write_pieces(f / "__0_0.distcp", pieces(n)), "__0_0.distcp"),
    "pieces, past the page cache": (
        lambda f, n: write_pieces(f / "__0_0.distcp", pieces(n), size=file_bytes(pieces(n))),
        "__0_0.distcp",
    ),
    "a rank's pieces": (rank, "__0_0.distcp"),
    "a rank's note": (lambda f, n: write_json(f / "rank_0.json", [n] * LONG), "rank_0.json"),
    "the manifest": (lambda f, n: write_manifest(f, {"step": [n] * LONG}), MANIFEST),
    "torch's metadata": (lambda f, n: finish(f, [], {}, [f"{n}.{name}" for name in range(LONG)], {}), ".metadata"),
    "the pointer": (lambda f, n: point_to(f, f"step_{n:06d}"), LATEST),
    "a shard": (shard, "model.safetensors"),
    "an index": (
        lambda f, n: write_index(f, {f"{n}": [PlannedTensor(f"{n}.{i}", torch.int64, torch.Size([1])) for i in range(LONG)]}),
        "model.safetensors.index.json",
    ),
    "trajectories": (lambda f, n: write_trajectories(f / "1.jsonl.gz", iter([{"id": [n] * LONG}])), "1.jsonl.gz"),
    "a timeline": (lambda f, n: write_timeline(f / "steps.json", []), "steps.json"),
    "metrics": (metrics, "metrics.jsonl"),
}  # fmt: skip


def dies(write: Write, folder: Path, most: int) -> None:
    """The kernel kills this process at the first byte beyond `most` of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    write(folder, 2)
    os._exit(0)


@pytest.mark.parametrize("what", WRITES)
def test_who_dies_half_way_through_a_write_leaves_the_earlier_content(
    what: str, tmp_path: Path
) -> None:
    write, name = WRITES[what]
    write(tmp_path, 1)
    whole = (tmp_path / name).read_bytes()
    for most in (0, len(whole) // 2, len(whole) - 1):
        child = multiprocessing.get_context("fork").Process(
            target=dies, args=(write, tmp_path, most)
        )
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGXFSZ, "it was to die in a write"
        assert (tmp_path / name).read_bytes() == whole, most
    write(tmp_path, 2)
    again = (tmp_path / name).read_bytes()
    assert len(again) == len(whole) and (again != whole or what in ("a timeline", "metrics"))


def completes(folder: Path, _: int) -> None:
    write_whole(folder, 1, {}, given_up=lambda: False)


def test_a_manifest_comes_after_all_that_it_speaks_of(tmp_path: Path) -> None:
    """Killed at whatever file: there is no manifest, or a whole one and all other files."""
    draft, whole = tmp_path / "draft", tmp_path / "whole"
    for folder in (draft, whole):
        folder.mkdir()
        rank(folder, 1)
    completes(whole, 1)
    names = {path.name for path in whole.iterdir()}
    ends = []
    for most in sorted({path.stat().st_size for path in whole.iterdir()} - {0}):
        child = multiprocessing.get_context("fork").Process(
            target=dies, args=(completes, draft, most - 1)
        )
        child.start()
        child.join(60)
        ends.append(child.exitcode)
        there = {path.name for path in draft.iterdir()}
        if MANIFEST in there:
            assert read_manifest(draft) == read_manifest(whole)
            assert there == names
    assert ends[0] == -signal.SIGXFSZ and ends[-1] == 0 and not {*ends} - {0, -signal.SIGXFSZ}


class Sparing(io.BytesIO):
    """Takes at most seven bytes at a call, as a full pipe may."""

    def write(self, view: Any) -> int:
        return super().write(view[:7])


def test_a_shards_checksum_is_of_what_was_written_however_much_a_call_takes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3
    stream = _Summed(Sparing())
    write_bytes(stream, content)
    assert stream.stream.getvalue() == content
    assert stream.sum.hexdigest() == xxhash.xxh3_128_hexdigest(content)
    tensor = torch.arange(LONG)
    written = write_shard(
        tmp_path / "model.safetensors",
        [PlannedTensor("w", tensor.dtype, tensor.shape)],
        iter([("w", tensor)]),
    )
    assert written.file == xxhash.xxh3_128_hexdigest((tmp_path / "model.safetensors").read_bytes())
