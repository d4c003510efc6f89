"""A byte that flipped in a model's folder is seen before the model is built."""

import hashlib
import json
import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from rftmega.config import ModelConfig, RewardConfig, RunConfig
from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.checksums import CHECKSUMS, known_sums, sum_of
from rftmega.models.hf.hf_folder import copy_companions
from rftmega.run.integrity import ChecksumReport, complaints, verify_models
from rftmega.run.process import joined
from rftmega.runtime.parallel import process_group
from rftmega.runtime.parallel.process_group import World
from rftmega.tools.convert import main
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """The tool silences them, as a program may."""
    yield
    logging.disable(logging.NOTSET)


def verify(folder: Path) -> None:
    verify_models(ALONE, RunConfig(model=ModelConfig(path=str(folder), verify=True)))


def flip(path: Path, at: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_flipped_byte_is_refused_by_file_from_the_second_start_on(
    file: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "llama")
    verify(folder)
    verify(folder)
    flip(folder / file)
    with pytest.raises(
        CheckpointError,
        match=rf"(?s)is not as it was \(model\.verify\).*  - {file} on .* has checksum xxh3:",
    ):
        verify(folder)


def test_nothing_is_written_or_read_unless_it_is_asked_for(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    verify_models(ALONE, RunConfig(model=ModelConfig(path=str(folder))))
    assert not (folder / CHECKSUMS).exists()


def test_the_tool_writes_checksums_and_other_folders_do_not_get_them(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    assert main(["checksums", str(folder)]) == 0
    files = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    assert known_sums(folder).keys() == files
    (tmp_path / "copy").mkdir()
    copy_companions(folder, tmp_path / "copy", {})
    assert not (tmp_path / "copy" / CHECKSUMS).exists()
    flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors on"):
        verify(folder)


def test_a_file_that_is_gone_or_came_later_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    verify(folder)
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    (folder / "generation_config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json is missing, other\.safetensors has none"
    ):
        verify(folder)


@pytest.mark.parametrize(
    "content", ["{}", '{"format": 1, "files": {"a": "xxh3:0"}, "seal": "x"}', "[", '{"files": [1]}']
)
def test_checksums_that_are_not_as_they_were_written_are_refused(
    content: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "llama")
    (folder / CHECKSUMS).write_text(content)
    with pytest.raises(CheckpointError, match=r"checksums\.json"):
        verify(folder)


def both_body(world: World, folder: Path) -> str:
    try:
        verify_models(world, RunConfig(model=ModelConfig(path=str(folder), verify=True)))
    except CheckpointError as error:
        return str(error)
    return ""


def test_two_processes_share_the_files_and_end_alike(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    assert run_ranks(2, both_body, folder) == ["", ""]
    for path in sorted(folder.glob("*.json")) + [folder / "model.safetensors"]:
        if path.name != CHECKSUMS:
            flip(path)
            first, second = run_ranks(2, both_body, folder)
            assert first == second
            assert f"  - {path.name} on" in first
            flip(path)


def joined_body(world: World, folder: Path, output: Path) -> str:
    process_group.start = lambda **_: nullcontext(world)  # this process is among the others already
    config = RunConfig(model=ModelConfig(path=str(folder), verify=True))
    config.trainer.output = str(output)
    try:
        with joined(config):
            return "it began"
    except CheckpointError as error:
        return str(error)


def test_a_run_looks_before_it_builds_anything(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    assert run_ranks(1, joined_body, folder, tmp_path / "out") == ["it began"]
    flip(folder / "model.safetensors")
    assert "model.safetensors on" in run_ranks(1, joined_body, folder, tmp_path / "out")[0]


def hub_cache(tmp_path: Path) -> Path:
    """A snapshot in the hub's cache: links to files that are named by their checksum."""
    source = save_tiny(tmp_path / "source", "llama")
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "0123",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        digest = (
            git_name(path)
            if path.suffix == ".json"
            else hashlib.sha256(path.read_bytes()).hexdigest()
        )
        shutil.move(path, blobs / digest)
        (snapshot / path.name).symlink_to(Path("../../blobs") / digest)
    return snapshot


def git_name(path: Path) -> str:
    return subprocess.run(
        ["git", "hash-object", str(path)], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_folder_of_the_hubs_cache_has_its_checksums_in_its_names(
    file: str, tmp_path: Path
) -> None:
    snapshot = hub_cache(tmp_path)
    verify(snapshot)
    assert not (snapshot / CHECKSUMS).exists()
    flip((snapshot / file).resolve())
    with pytest.raises(CheckpointError, match=rf"{file} on .* has checksum (sha256|git):"):
        verify(snapshot)


def test_a_download_to_a_folder_has_them_in_its_notes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    notes = folder / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (notes / "model.safetensors.metadata").write_text(f"0123\n{digest}\n1700000000.0\n")
    verify(folder)
    assert not (folder / CHECKSUMS).exists()
    flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"not sha256:{digest}"):
        verify(folder)


def test_every_model_of_the_run_is_looked_at(tmp_path: Path) -> None:
    policy, judge = save_tiny(tmp_path / "policy", "llama"), save_tiny(tmp_path / "judge", "qwen3")
    teacher = save_tiny(tmp_path / "teacher", "llama")
    config = RunConfig(
        model=ModelConfig(path=str(policy), verify=True),
        reward=RewardConfig(model=1.0, model_path=str(judge)),
    )
    config.algorithm.teachers = [Teacher(path=str(teacher)), Teacher(path="self", prompt="hint")]
    verify_models(ALONE, config)
    for folder in (judge, teacher):
        flip(folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=str(folder)):
            verify_models(ALONE, config)
        flip(folder / "model.safetensors")


def test_hosts_that_hold_different_files_are_named_at_the_first_start() -> None:
    reports = [
        ChecksumReport("a", {"x": "xxh3:1"}, None),
        ChecksumReport("b", {"x": "xxh3:2", "y": "xxh3:3"}, None),
        ChecksumReport("c", {}, "gone"),
    ]
    assert complaints(reports, {}) == ["on c: gone", "x on b has checksum xxh3:2, on a xxh3:1"]
    assert complaints(reports[:1], {"x": "xxh3:1"}) == []


def test_a_checksum_is_that_of_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sum_of(tmp_path / "a", "sha256") == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    assert sum_of(tmp_path / "a", "git") == f"git:{git_name(tmp_path / 'a')}"
    assert (
        json.loads(json.dumps(sum_of(tmp_path / "a", "xxh3")))
        == "xxh3:06b05ab6733a618578af5f94892f3950"
    )
