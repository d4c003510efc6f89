"""Hugging Face folder -> distributed checkpoint -> any layout, and back; broken off, damaged and
resumed.
"""

import json
import os
import random
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from rftmega.checkpoints.distributed import write_manifest
from rftmega.checkpoints.reader import FORMAT, MANIFEST, PROGRESS
from rftmega.config import ParallelConfig
from rftmega.core.errors import CheckpointError, LockedError
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.checksums import files_of, known_sums
from rftmega.models.hf.stacked_files import open_folder
from rftmega.run.conversion import convert
from rftmega.run.conversion.target_folder import begin, written_alone
from rftmega.runtime.parallel.folder_lock import FILE as LOCK
from tests.block_scales import quantise_folder
from tests.chosen import chosen
from tests.layouts import build_critic, build_manager, packed_logits
from tests.ranks import RankFailure, run_ranks
from tests.tiny_models import VARIANTS, save_tiny, transformers_logits, with_predictor

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


def megatrons_own_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    """As any program on Megatron-Core loads it."""
    from megatron.core import dist_checkpointing

    manager = build_manager(folder, parallel)
    for item in manager.bound:
        item.parameter.data.zero_()
    with manager.topology.active():
        states = {
            str(number): chunk.sharded_state_dict() for number, chunk in enumerate(manager.chunks)
        }
        loaded = dist_checkpointing.load(states, str(folder))
        for number, chunk in enumerate(manager.chunks):
            chunk.load_state_dict(loaded[str(number)], strict=True)
    return packed_logits(manager, ROWS)


def read_body(world: Any, folder: Path, parallel: ParallelConfig) -> int:
    """Bytes of tensors that this rank read."""
    from rftmega.checkpoints.reader import Reader

    read = []
    real = Reader._read

    def counted(self: Any, box: Any, tensor: torch.Tensor) -> torch.Tensor:
        read.append(tensor.nbytes)
        return real(self, box, tensor)

    Reader._read = counted  # type: ignore[method-assign]
    build_manager(folder, parallel)
    return sum(read)


@pytest.mark.parametrize("variant", [pytest.param("qwen2", marks=pytest.mark.ranks), "qwen3-moe"])
def test_ranks_together_read_a_checkpoint_once_a_replica(variant: str, tmp_path: Path) -> None:
    """Whatever layout it was cut for; what every rank of a stage holds (norms, routers) is read by
    each of them.
    """
    source = save_tiny(tmp_path / "hf", variant)
    run_ranks(1, there_body, source, tmp_path / "megatron", P())
    tensors = load_file(source / "model.safetensors")
    whole = sum(t.nbytes for t in tensors.values())
    everywhere = sum(
        t.nbytes
        for name, t in tensors.items()
        if t.dim() == 1 and "proj" not in name or "mlp.gate." in name
    )
    sequence = variant == "qwen3-moe"
    for world, parallel, replicas in (
        (4, P(tensor=4, sequence=sequence), 1),
        (4, P(tensor=2, pipeline=2, sequence=sequence), 1),
        (4, P(tensor=2, sequence=sequence), 2),
    ):
        if sequence:
            experts = sum(t.nbytes for name, t in tensors.items() if ".experts." in name)
            # experts are not split: a copy a process of the stage
            copies = world // parallel.pipeline
            wanted = (
                (whole - experts - everywhere) * replicas + everywhere * copies + experts * copies
            )
        else:
            wanted = (whole - everywhere) * replicas + everywhere * world // parallel.pipeline
        assert sum(run_ranks(world, read_body, tmp_path / "megatron", parallel)) == wanted, parallel


def test_a_folder_of_8_bit_numbers_is_converted_to_what_they_and_their_scales_say(
    tmp_path: Path,
) -> None:
    plain = save_tiny(tmp_path / "plain", "deepseek-v3")
    said = quantise_folder(plain, tmp_path / "hf", (20, 28))
    parallel = P(tensor=2, sequence=True)
    run_ranks(1, there_body, tmp_path / "hf", tmp_path / "megatron", parallel)
    run_ranks(1, back_body, tmp_path / "megatron", tmp_path / "back")
    back = {
        name: tensor
        for file in (tmp_path / "back").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert back.keys() == said.keys()
    assert all(torch.equal(back[name], said[name]) for name in said)
    assert "quantization_config" not in read_hf_config(tmp_path / "back")


FAST = ["qwen2-tied"]
SLOW = [
    pytest.param(variant, marks=pytest.mark.ranks) for variant in VARIANTS if variant not in FAST
]


@pytest.mark.parametrize("variant", [*FAST, *SLOW])
def test_there_and_back_gives_every_byte_and_every_layout_reads_it(
    variant: str, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "hf", variant)
    disk = load_file(source / "model.safetensors")
    tensors = len(list(open_folder(source, read_hf_config(source)).names))
    (source / "tokenizer.json").write_text("{}")
    assert run_ranks(1, there_body, source, tmp_path / "megatron", P(tensor=2, sequence=True)) == [
        tensors
    ]
    assert run_ranks(1, back_body, tmp_path / "megatron", tmp_path / "back") == [tensors]
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    back = {
        name: tensor
        for file in files
        for name, tensor in load_file(tmp_path / "back" / file).items()
    }
    assert back.keys() == disk.keys()
    assert all(torch.equal(back[name], disk[name]) for name in disk)
    assert (tmp_path / "back/tokenizer.json").is_file()
    wanted = torch.cat([logits[:-1] for logits in transformers_logits(source, ROWS)])
    for processes, parallel in (
        (1, P()),
        (4, P(tensor=2, pipeline=2, sequence=True)),
        (2, P(pipeline=2, virtual_pipeline=2)),
    ):
        found = [
            x
            for x in run_ranks(processes, logits_body, tmp_path / "megatron", parallel)
            if x is not None
        ]
        assert found
        assert all((logits - wanted).abs().max() < 1e-5 for logits in found), parallel
    found = [
        x
        for x in run_ranks(2, megatrons_own_body, tmp_path / "megatron", P(tensor=2, sequence=True))
        if x is not None
    ]
    assert all((logits - wanted).abs().max() < 1e-5 for logits in found)


def critic_body(world: Any, folder: Path) -> torch.Tensor:
    return build_critic(folder, P()).manager.chunks[0].value_head.weight.detach().clone()


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.ranks), True])
def test_a_reward_model_keeps_its_head(bias: bool, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    head = {"score.weight": torch.randn(1, 64)} | ({"score.bias": torch.randn(1)} if bias else {})
    save_file(tensors | head, source / "model.safetensors")
    run_ranks(1, there_body, source, tmp_path / "megatron", P())
    assert torch.equal(run_ranks(1, critic_body, tmp_path / "megatron")[0], head["score.weight"])
    assert run_ranks(1, back_body, tmp_path / "megatron", tmp_path / "back") == [
        len(tensors) + len(head)
    ]


def test_a_critic_starts_from_a_policys_checkpoint(tmp_path: Path) -> None:
    run_ranks(1, there_body, save_tiny(tmp_path / "hf", "qwen3"), tmp_path / "megatron", P())
    assert run_ranks(1, critic_body, tmp_path / "megatron")[0].abs().sum() == 0


def dying_body(world: Any, direction: str, source: Path, target: Path, after: int) -> None:
    """Dies as a killed process does, after so many bytes."""
    written = 0
    writer = {"to_megatron": convert.write_pieces, "to_hf": convert.write_shard}[
        direction
    ].__globals__
    real = writer["write_all"]

    def deadly(stream: Any, tensor: torch.Tensor) -> None:
        nonlocal written
        real(stream, tensor)
        written += tensor.nbytes
        if written > after:
            os.kill(os.getpid(), 9)

    writer["write_all"] = deadly
    if direction == "to_megatron":
        there_body(world, source, target, P(tensor=2, sequence=True))
    else:
        back_body(world, source, target)


@pytest.mark.parametrize("direction", ["to_megatron", "to_hf"])
def test_killed_at_random_points_it_is_unfinished_and_goes_on(
    direction: str, tmp_path: Path
) -> None:
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
    _, *noted = (done / PROGRESS).read_text().splitlines()
    with (done / PROGRESS).open("ab") as stream:
        stream.write(b'{"file": "mo\n\0\0\0\n')  # of a machine that lost its power
    finished = {
        path: path.stat().st_mtime_ns
        for path in (done / json.loads(line)["file"] for line in noted)
    }
    assert finished, "nothing was left to go on from"
    body, more = (
        (there_body, [P(tensor=2, sequence=True)])
        if direction == "to_megatron"
        else (back_body, [])
    )
    assert run_ranks(1, body, source, done, *more)[0] > 0
    assert all(path.stat().st_mtime_ns == then for path, then in finished.items()), (
        "a finished file was written again"
    )
    assert not (done / PROGRESS).exists()
    if direction == "to_hf":
        told = {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in files_of(done)}
        assert known_sums(done) == {name: f"xxh3:{digest}" for name, digest in told.items()}
        assert len(told) > len(finished), "files of both starts, and config.json"


def damage(folder: Path, what: str) -> Path:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["seal"]
    piece = next(
        piece for piece in manifest["pieces"] if piece["key"].endswith("linear_fc2.weight")
    )
    path = folder / piece["file"]
    if what == "a wrong byte":
        content = bytearray(path.read_bytes())
        content[piece["begin"] + piece["length"] // 2] ^= 1
        path.write_bytes(content)
    if what == "a file cut off":
        path.write_bytes(path.read_bytes()[: piece["begin"] + 100])
    if what == "a piece gone":
        manifest["pieces"].remove(piece)
        write_manifest(folder, manifest)
    if what == "a newer format":
        (folder / MANIFEST).write_text(json.dumps(manifest | {"format": FORMAT + 1}))
    if what == "two shapes swapped":
        shapes = manifest["shapes"]
        shapes["decoder.layers.mlp.linear_fc1.weight"] = [4, 64, 192]
        write_manifest(folder, manifest)
    if what == "another tensor":
        for each in manifest["pieces"]:
            each["key"] = each["key"].replace("linear_fc2", "linear_fc3")
        write_manifest(folder, manifest)
    if what == "a manifest without its seal":
        (folder / MANIFEST).write_text(json.dumps(manifest))
    if what == "no manifest":
        (folder / MANIFEST).unlink()
    return folder


def refused_body(world: Any, folders: dict[str, Path], back: Path) -> dict[str, list[str]]:
    """Why each folder is not converted, and why it is not loaded."""
    return {
        what: [why_not(back_body, folder, back / what), why_not(logits_body, folder, P())]
        for what, folder in folders.items()
    }


def why_not(body: Any, *arguments: Any) -> str:
    try:
        body(None, *arguments)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def refusals(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("damaged")
    whole = folder / "whole"
    source = save_tiny(folder / "hf", "qwen3")
    run_ranks(1, there_body, source, whole, P(tensor=2, sequence=True))
    damaged = {
        what: damage(Path(shutil.copytree(whole, folder / what)), what)
        for what in chosen(request, "what")
    }
    (said,) = run_ranks(1, refused_body, damaged, folder / "back")
    assert not list(folder.glob(f"back/*/{MANIFEST}"))
    return said


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("a wrong byte", "has checksum"),
        ("a file cut off", "can't be read"),
        ("a piece gone", "are missing"),
        (
            "a newer format",
            f"is of format {FORMAT + 1}; this version reads 2, 3, 4, 5 and {FORMAT}",
        ),
        ("no manifest", "did not end"),
        ("a manifest without its seal", "its checksum is another"),
        ("two shapes swapped", "has shape (4, 64, 192); the model's is (4, 192, 64)"),
        ("another tensor", "holds no tensor 'decoder.layers.mlp.linear_fc2.weight'"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    what: str, complaint: str, refusals: dict[str, list[str]]
) -> None:
    for why in refusals[what]:
        assert complaint in why


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        begin(tmp_path, {"source": "a"})
    shutil.rmtree(tmp_path)
    assert begin(tmp_path, {"source": "a"}) == {}
    with pytest.raises(CheckpointError, match="conversion of something else"):
        begin(tmp_path, {"source": "b"})


@pytest.mark.parametrize(
    ("variant", "name", "like"),
    [
        ("qwen3", "model.layers.1.mlp.up_proj.weight", "gate_proj"),  # fused with it in Megatron
        ("qwen2", "model.layers.0.self_attn.v_proj.bias", "q_proj"),
        # stacked with it
        ("qwen3", "model.layers.2.mlp.down_proj.weight", "layers.0.mlp.down_proj"),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.ranks)]
)
def test_parts_of_one_tensor_that_differ_in_dtype_are_refused(
    variant: str, name: str, like: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """fp16 beside bf16 would be read bit by bit."""
    source = save_tiny(tmp_path / "hf", variant)
    tensors = {
        key: tensor.half() for key, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors | {name: tensors[name].to(dtype)}, source / "model.safetensors")
    with pytest.raises(RankFailure, match="CheckpointError") as refusal:
        run_ranks(1, there_body, source, tmp_path / "megatron", P())
    assert f"{dtype} and " in str(refusal.value)
    assert name in str(refusal.value)
    assert like in str(refusal.value)
    assert not (tmp_path / "megatron").exists()


def told_body(world: Any, source: Path, target: Path, back: Path) -> list[Any]:
    changed = [convert.to_megatron(source, target, P()), convert.to_hf(target, back)]
    return [*changed, *map(convert.told_left_out, (source, back))]


def test_layers_that_predict_a_second_token_are_left_out_with_their_field_and_named(
    tmp_path: Path,
) -> None:
    source = save_tiny(tmp_path / "hf", "deepseek-v3")
    added = with_predictor(source, 4)
    there, back, left_out, left_out_again = run_ranks(
        1, told_body, source, tmp_path / "megatron", tmp_path / "back"
    )[0]
    assert "num_nextn_predict_layers=0" in there
    assert left_out == f"model.layers.4.* ({len(added)} tensors)"
    assert (back, left_out_again) == (None, None)
    for folder in ("megatron", "back"):
        assert (
            json.loads((tmp_path / folder / "config.json").read_text())["num_nextn_predict_layers"]
            == 0
        )


def test_angles_that_old_folders_hold_are_named_and_not_their_layers(tmp_path: Path) -> None:
    source = save_tiny(tmp_path, "llama")
    file = source / "model.safetensors"
    layers = range(json.loads((source / "config.json").read_text())["num_hidden_layers"])
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in layers]
    tensors = load_file(file)
    save_file(tensors | {name: torch.ones(8) for name in names}, file)
    told = f"{names[0]} ({len(names)} tensors of this name, one a layer)"
    assert convert.told_left_out(source) == told
    save_file(tensors | {names[1]: torch.ones(8)}, file)
    assert convert.told_left_out(source) == names[1]


def small_disk_body(world: Any, direction: str, source: Path, target: Path, most: int) -> str:
    """With files of at most `most` bytes; what is said, and whether only whole files have their
    names.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        there_body(world, source, target, P()) if direction == "to_megatron" else back_body(
            world, source, target
        )
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "it was written"


@pytest.mark.parametrize("direction", ["to_megatron", "to_hf"])
def test_a_disk_that_takes_no_more_is_said_and_leaves_nothing_half_made(
    direction: str, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    (source / "tokenizer.json").write_text("x" * 100_000)
    body, more = (there_body, [P()]) if direction == "to_megatron" else (back_body, [])
    if direction == "to_hf":
        run_ranks(1, there_body, source, tmp_path / "megatron", P())
        source = tmp_path / "megatron"
    done = tmp_path / "done"
    for most in (40_000, 90_000):  # not for all tensors; for those, but not for the tokenizer
        said = run_ranks(1, small_disk_body, direction, source, done, most)[0]
        assert said.startswith(f"The conversion to {done} broke off: File too large")
        assert not list(done.glob("*.part"))
        assert not list(done.glob(".rftmega*"))
        assert not (done / MANIFEST).exists()
        assert not (done / "tokenizer.json").exists()
    assert run_ranks(1, body, source, done, *more)[0] > 0
    assert (done / "tokenizer.json").stat().st_size == 100_000


def test_two_conversions_into_one_folder_the_second_is_refused_with_the_first_ones_name(
    tmp_path: Path,
) -> None:
    source, target = save_tiny(tmp_path / "hf", "qwen3"), tmp_path / "megatron"
    with written_alone(target), pytest.raises(RankFailure, match="LockedError") as refusal:
        run_ranks(1, there_body, source, target, P())
    assert (
        f"{target} is in use by another conversion, process {os.getpid()} on {socket.gethostname()}"
        in str(refusal.value)
    )
    assert run_ranks(1, there_body, source, target, P())[0] > 0
    assert not list(target.glob(".rftmega*"))


def test_the_lock_of_a_conversion_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    source, target = save_tiny(tmp_path / "hf", "qwen3"), tmp_path / "megatron"
    with pytest.raises(RankFailure, match="died"):
        run_ranks(1, dying_body, "to_megatron", source, target, 1000)
    assert (target / LOCK).is_file()
    assert run_ranks(1, there_body, source, target, P(tensor=2, sequence=True))[0] > 0


def test_a_target_that_is_a_file_or_takes_no_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing/here")):
        with (
            pytest.raises(
                LockedError,
                match=f"{target} can't be used: .*must be a folder that can be written to",
            ),
            written_alone(target),
        ):
            raise AssertionError("it was locked")
    assert (tmp_path / "file").read_text() == "mine"
