"""Hugging Face folder -> distributed checkpoint -> any layout, and back; broken off, damaged and resumed."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.checkpoint import convert
from rftmega.config import ParallelConfig
from rftmega.errors import CheckpointError
from rftmega.megatron.sharded import MANIFEST, PROGRESS
from tests.layouts import build_critic, build_manager, packed_logits
from tests.ranks import RankFailure, run_ranks
from tests.tiny_models import VARIANTS, save_tiny, transformers_logits

P = ParallelConfig
ROWS = [[5, 9, 130, 2, 77], [3, 0, 7]]


def there_body(world: Any, source: Path, target: Path, parallel: ParallelConfig) -> int:
    convert.FILE_BYTES = 60_000  # several files
    convert.to_megatron(source, target, parallel)
    return convert.verify(source, target)


def back_body(world: Any, source: Path, target: Path) -> int:
    convert.FILE_BYTES = 60_000
    convert.to_hf(source, target)
    return convert.verify(source, target)


def logits_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    return packed_logits(build_manager(folder, parallel), ROWS)


FAST = ["qwen2-tied", "deepseek-v3"]
SLOW = [pytest.param(variant, marks=pytest.mark.ranks) for variant in VARIANTS if variant not in FAST]


@pytest.mark.parametrize("variant", [*FAST, *SLOW])
def test_there_and_back_gives_every_byte_and_every_layout_reads_it(variant: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", variant)
    disk = load_file(source / "model.safetensors")
    (source / "tokenizer.json").write_text("{}")
    assert run_ranks(1, there_body, source, tmp_path / "megatron", P(tensor=2, sequence=True)) == [len(disk)]
    assert run_ranks(1, back_body, tmp_path / "megatron", tmp_path / "back") == [len(disk)]
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    back = {name: tensor for file in files for name, tensor in load_file(tmp_path / "back" / file).items()}
    assert back.keys() == disk.keys()
    assert all(torch.equal(back[name], disk[name]) for name in disk)
    assert (tmp_path / "back/tokenizer.json").is_file()
    wanted = torch.cat([logits[:-1] for logits in transformers_logits(source, ROWS)])
    for processes, parallel in ((1, P()), (4, P(tensor=2, pipeline=2, sequence=True)), (2, P(pipeline=2, virtual_pipeline=2))):
        found = [x for x in run_ranks(processes, logits_body, tmp_path / "megatron", parallel) if x is not None]
        assert found
        assert all((logits - wanted).abs().max() < 1e-5 for logits in found), parallel


def critic_body(world: Any, folder: Path) -> torch.Tensor:
    return build_critic(folder, P()).manager.chunks[0].value_head.weight.detach().clone()


@pytest.mark.parametrize("bias", [False, True])
def test_a_reward_model_keeps_its_head(bias: bool, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    head = {"score.weight": torch.randn(1, 64)} | ({"score.bias": torch.randn(1)} if bias else {})
    save_file(tensors | head, source / "model.safetensors")
    run_ranks(1, there_body, source, tmp_path / "megatron", P())
    assert torch.equal(run_ranks(1, critic_body, tmp_path / "megatron")[0], head["score.weight"])
    assert run_ranks(1, back_body, tmp_path / "megatron", tmp_path / "back") == [len(tensors) + len(head)]


def dying_body(world: Any, direction: str, source: Path, target: Path, after: int) -> None:
    """Dies as a killed process does, after so many bytes."""
    written = 0
    real = {"to_megatron": torch.save, "to_hf": convert.write_shard.__globals__["write_all"]}[direction]

    def deadly(*arguments: Any) -> None:
        nonlocal written
        real(*arguments)
        written += next(x.nbytes for x in arguments if isinstance(x, torch.Tensor))
        if written > after:
            os.kill(os.getpid(), 9)

    if direction == "to_megatron":
        torch.save = deadly  # type: ignore[assignment]
        there_body(world, source, target, P(tensor=2, sequence=True))
    else:
        convert.write_shard.__globals__["write_all"] = deadly
        back_body(world, source, target)


@pytest.mark.parametrize("direction", ["to_megatron", "to_hf"])
def test_killed_at_random_points_it_is_unfinished_and_goes_on(direction: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    total = sum(tensor.nbytes for tensor in load_file(source / "model.safetensors").values())
    if direction == "to_hf":
        run_ranks(1, there_body, source, tmp_path / "megatron", P())
        source = tmp_path / "megatron"
    draw = random.Random(4)
    done = tmp_path / "done"
    for _ in range(5):
        with pytest.raises(RankFailure, match="died"):
            run_ranks(1, dying_body, direction, source, done, draw.randrange(total // 3))
        assert (done / PROGRESS).is_file()
        assert not (done / MANIFEST).exists()
        with pytest.raises(RankFailure, match="holds no config.json"):
            run_ranks(1, logits_body, done, P())
    finished = {path: path.stat().st_mtime_ns for path in done.iterdir() if path.suffix in (".distcp", ".safetensors")}
    assert finished, "nothing was left to go on from"
    body, more = (there_body, [P(tensor=2, sequence=True)]) if direction == "to_megatron" else (back_body, [])
    assert run_ranks(1, body, source, done, *more)[0] > 0
    assert all(path.stat().st_mtime_ns == then for path, then in finished.items()), "a finished file was written again"
    assert not (done / PROGRESS).exists()


def damage(folder: Path, what: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    piece = next(piece for piece in manifest["pieces"] if piece["key"].endswith("linear_fc2.weight"))
    path = folder / piece["file"]
    if what == "a wrong byte":
        content = bytearray(path.read_bytes())
        content[piece["begin"] + piece["length"] // 2] ^= 1
        path.write_bytes(content)
    if what == "a file cut off":
        path.write_bytes(path.read_bytes()[: piece["begin"] + 100])
    if what == "a piece gone":
        manifest["pieces"].remove(piece)
        (folder / MANIFEST).write_text(json.dumps(manifest))
    if what == "a newer format":
        (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    if what == "no manifest":
        (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("a wrong byte", "has checksum"),
        ("a file cut off", "can't be read"),
        ("a piece gone", "are missing"),
        ("a newer format", "is of format 2; this version reads 1"),
        ("no manifest", "did not end"),
    ],
)
def test_a_damaged_checkpoint_is_refused(what: str, complaint: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    run_ranks(1, there_body, source, tmp_path / "megatron", P(tensor=2, sequence=True))
    damage(tmp_path / "megatron", what)
    with pytest.raises(RankFailure) as caught:
        run_ranks(1, back_body, tmp_path / "megatron", tmp_path / "back")
    assert "CheckpointError" in str(caught.value)
    assert complaint in str(caught.value)
    assert not (tmp_path / "back" / MANIFEST).exists()


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        convert.begin(tmp_path, {"source": "a"})
    shutil.rmtree(tmp_path)
    assert convert.begin(tmp_path, {"source": "a"}) == {}
    with pytest.raises(CheckpointError, match="conversion of something else"):
        convert.begin(tmp_path, {"source": "b"})
