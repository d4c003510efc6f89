"""The files of a distributed checkpoint: what is in them, and that each of them is as it was
written.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from rftmega.checkpoints import distributed
from rftmega.checkpoints.distributed import Boxed, file_bytes, finish, write_pieces
from rftmega.checkpoints.o_direct import DirectFile
from rftmega.checkpoints.reader import MARK, Reader
from rftmega.core.errors import CheckpointError

PIECES: list[Boxed] = [
    ("a", (0, 0), torch.arange(6.0).view(2, 3)),
    ("b", (0,), torch.arange(5, dtype=torch.bfloat16)),
]


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    stored = write_pieces(folder / "__0_0.distcp", PIECES, size=file_bytes(PIECES))
    finish(folder, stored, {key: tuple(box.shape) for key, _, box in PIECES}, ["an object"], {})
    return folder


def test_past_the_page_cache_or_not_the_file_is_the_same_and_of_the_size_that_was_told(
    tmp_path: Path,
) -> None:
    stored = [
        write_pieces(tmp_path / name, PIECES, size=size)
        for name, size in (("one", None), ("two", file_bytes(PIECES)))
    ]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert len((tmp_path / "one").read_bytes()) == file_bytes(PIECES)
    assert [(box.begin, box.length, box.checksum) for box in stored[0]] == [
        (box.begin, box.length, box.checksum) for box in stored[1]
    ]


def test_pieces_may_cross_the_ends_of_what_is_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[Boxed] = [(f"k{n}", (0,), torch.arange(float(37 * n))) for n in range(1, 40)]
    write_pieces(tmp_path / "one", boxes)
    monkeypatch.setattr(distributed, "DirectFile", partial(DirectFile, chunk=4096))
    write_pieces(tmp_path / "two", boxes, size=file_bytes(boxes))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("name", [".metadata", "common.pt", MARK, "__objects.distcp"])
def test_a_wrong_byte_in_what_describes_a_checkpoint_is_refused_with_the_files_name(
    name: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "kept")
    Reader(folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{name} is not as it was written: its checksum is another"
    ):
        Reader(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} can't be read"):
        Reader(folder)
