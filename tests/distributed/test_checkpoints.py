"""Training goes on from a checkpoint: bit for bit under the same layout, within fp32 noise under
another; and what is no whole checkpoint is none.
"""

import errno
import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.backends.megatron import MegatronActor
from rftmega.backends.optimizers.offload import inner_optimizers
from rftmega.checkpoints import retention, training_files
from rftmega.checkpoints import run_checkpoints as saving
from rftmega.checkpoints.reader import FORMAT, MANIFEST, MARK, seal
from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.checkpoints.state_split import KEY
from rftmega.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rftmega.core.errors import CheckpointError
from rftmega.models.hf import hf_folder
from rftmega.run.placement.export import export as export_model
from rftmega.runtime.device.residency import ADAM, PARTS
from rftmega.runtime.parallel import seeds
from rftmega.runtime.parallel.nodes import versions
from rftmega.runtime.parallel.topology import Topology
from rftmega.trainer.experience import given
from tests import optional
from tests.layouts import config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
PLAIN = OptimizerConfig(
    learning_rate=1e-2, epsilon=1e-4, distributed=False, schedule="linear", warmup_steps=2
)
SHARDED = replace(PLAIN, distributed=True)
TOKENS = [
    [1, 2, 3, 4],
    [5, 6],
    [7, 8, 9, 10, 11],
    [3, 1, 2],
    [12, 13, 14],
    [9, 9],
    [4, 5, 6, 7],
    [1, 3],
]
STEPS = 5
Case = tuple[int, ParallelConfig, OptimizerConfig]


def actor_of(
    folder: Path, parallel: ParallelConfig, optimizer: OptimizerConfig, dtype: str, dropout: float
) -> MegatronActor:
    config = config_of(folder, parallel, optimizer, dtype=dtype, dropout=dropout)
    config.algorithm.ema_beta = 0.5
    if optimizer.states != "float32":
        optional.find()
    return MegatronActor(config, Topology.create(parallel, seed=1))


def kept_by(actor: MegatronActor, folder: Path, **settings: Any) -> TrainingCheckpoints:
    return TrainingCheckpoints(folder, {"policy": actor}, actor.manager.cfg, **settings)


def learn(actor: MegatronActor, steps: int) -> list[float]:
    """Losses of steps that each learn from the same rows."""
    return [actor.step(given(rows_of(TOKENS)), cross_entropy_loss())["loss"] for _ in range(steps)]


def save_body(
    world: Any, model: Path, folder: Path, case: tuple[Any, ...], settings: dict[str, Any]
) -> list[float]:
    """Three steps, a save, and what the next steps' losses are; meanwhile it is written."""
    actor = actor_of(model, *case)
    learn(actor, 3)
    kept = kept_by(actor, folder, **settings)
    kept.save(state_with_tensors(), step=3)
    # before it is surely written: a snapshot that is no copy would hold what comes of these
    losses = learn(actor, STEPS)
    kept.wait()
    return losses


def resume_body(
    world: Any, model: Path, folder: Path, again: Path, case: tuple[Any, ...]
) -> list[float]:
    actor = actor_of(model, *case)
    kept = kept_by(actor, folder)
    found, expected = kept.resume(), state_with_tensors()
    assert found is not None
    for name, tensor in expected.pop("rows").items():
        back = found["rows"][name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(back, tensor), name
    assert found.pop("rows").keys() == {"counts", "chosen", "mask", "one", "none", "exact"}
    assert found == expected
    kept_by(actor, again).save({}, step=3)  # what was taken back, for a comparison of all its bits
    return learn(actor, STEPS)


def state_with_tensors() -> dict[str, Any]:
    rows = {
        "counts": torch.arange(70000).view(7, -1),
        "chosen": torch.tensor([[3, -1]]),
        "mask": torch.tensor([True, False, True]),
        "one": torch.tensor(1 / 3),
        "none": torch.empty(0, 5, dtype=torch.int64),
        "exact": torch.tensor([0.1], dtype=torch.float64),
    }
    return {"trainer": {"step": 3, "rest": [None, {"a": 0.1}, "text"]}, "rows": rows}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint's models, whole, without the vocabulary's padding."""
    reader = training_files.TrainingReader(folder)
    found = {}
    for key in (key for key in reader.stored if not key.startswith(KEY)):
        whole = torch.empty(reader.manifest["shapes"][key], dtype=reader.dtype_of(key))
        reader.fill(whole, key, (0,) * whole.dim())
        found[key] = whole[:131] if "word_embeddings" in key or "output_layer" in key else whole
    return found


def resumed(
    tmp_path: Path,
    variant: str,
    saved: Case,
    others: list[Case],
    *,
    dtype: str = "float32",
    dropout: float = 0.0,
) -> tuple[list[float], list[list[float]]]:
    """(losses after a save, those of each resume); all that was saved came back, whatever the
    layout.
    """
    model, folder = save_tiny(tmp_path / "model", variant), tmp_path / "kept"
    (expected, *_) = run_ranks(
        saved[0], save_body, model, folder, (*saved[1:], dtype, dropout), {"asynchronous": True}
    )
    whole = tensors(folder / "step_000003")
    kinds = {key.split("/")[1] for key in whole}
    assert kinds == {"weights", "average", "exp_avg", "exp_avg_sq"} | (
        {"main"} if dtype == "bfloat16" else set()
    )
    found = []
    for number, (ranks, *case) in enumerate(others):
        again = tmp_path / f"again{number}"
        (losses, *_) = run_ranks(ranks, resume_body, model, folder, again, (*case, dtype, dropout))
        found.append(losses)
        back = tensors(again / "step_000003")
        assert back.keys() == whole.keys()
        odd = [key for key, tensor in whole.items() if not torch.equal(tensor, back[key])]
        assert not odd, odd
    return expected, found


def test_a_run_goes_on_bit_for_bit_and_its_snapshot_is_a_copy(tmp_path: Path) -> None:
    """With dropout: the random streams go on, too."""
    case = (2, P(tensor=2), PLAIN)
    expected, (found,) = resumed(tmp_path, "qwen3-tied", case, [case], dropout=0.1)
    assert found == expected
    assert len(set(expected)) == STEPS
    manifest = json.loads((tmp_path / "kept" / "step_000003" / MANIFEST).read_text())
    assert (manifest["step"], manifest["models"]["policy"]["adam_steps"]) == (3, 3)
    assert manifest["code"]["rftmega"] == versions()["rftmega"], (
        "of the sources: what is not installed has no version"
    )
    # torch's own reader knows it
    described = FileSystemReader(tmp_path / "kept" / "step_000003").read_metadata()
    assert "policy/weights/model.layers.0.mlp.down_proj.weight" in described.state_dict_metadata


@pytest.mark.ranks
def test_a_run_saved_by_four_processes_goes_on_in_one(tmp_path: Path) -> None:
    expected, found = resumed(
        tmp_path, "qwen3", (4, P(tensor=2, pipeline=2), PLAIN), [(1, P(), SHARDED)]
    )
    assert found[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("dtype", "states"),
    [
        ("bfloat16", "8bit"),
        ("float32", "8bit"),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_a_run_with_narrow_states_goes_on_bit_for_bit(
    states: str, dtype: str, tmp_path: Path
) -> None:
    optimizer = replace(SHARDED, states=states)
    case = (2, P(), optimizer) if dtype == "float32" else (2, P(tensor=2), optimizer)
    expected, (found,) = resumed(tmp_path, "qwen3", case, [case], dtype=dtype)
    assert found == expected
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.ranks
def test_narrow_states_are_read_under_another_layout(tmp_path: Path) -> None:
    optimizer = replace(PLAIN, states="bfloat16")
    expected, (found,) = resumed(
        tmp_path / "16", "qwen3", (2, P(tensor=2), optimizer), [(2, P(pipeline=2), optimizer)]
    )
    assert found == pytest.approx(expected, rel=1e-3)
    model, folder = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "8"
    optimizer = replace(PLAIN, states="8bit")
    case, elsewhere = (P(tensor=2), optimizer, "float32", 0.0), (P(), optimizer, "float32", 0.0)
    (expected, *_) = run_ranks(2, save_body, model, folder, case, {})
    (found,) = run_ranks(1, resume_body, model, folder, tmp_path / "again", elsewhere)
    assert found == pytest.approx(expected, rel=1e-2)


def narrow_bodies(world: Any, model: Path) -> dict[str, tuple[dict[str, int], int]]:
    return {
        states: narrow_body(world, model, (P(), replace(SHARDED, states=states)))
        for states in NARROW
    }


def narrow_body(world: Any, model: Path, case: tuple[Any, ...]) -> tuple[dict[str, int], int]:
    """Learns and has the device's memory taken between steps. Returns bytes on the device by part,
    and the elements of Adam's parameters.
    """
    actor = actor_of(model, *case, "float32", 0.0)
    undisturbed = actor_of(model, *case, "float32", 0.0)
    for _ in range(3):
        learn(actor, 1)
        actor.residency.only()
        inners = inner_optimizers(actor.manager.optimizer)
        moments = [state["exp_avg"] for inner in inners for state in inner.optimizer.state.values()]
        parts = [getattr(moment, "scale", moment) for moment in moments]
        assert all(part.untyped_storage().nbytes() == 0 for part in parts)
        actor.residency.only(*PARTS)
    assert learn(actor, 1) == learn(undisturbed, 4)[3:]
    mains = [
        main
        for inner in inner_optimizers(actor.manager.optimizer)
        for main in inner.optimizer.state
    ]
    return actor.residency.bytes(), sum(main.numel() for main in mains)


NARROW = {"bfloat16": 0.5, "8bit": 0.26}


def test_narrow_states_take_less_memory_and_come_back_from_the_host(tmp_path: Path) -> None:
    for found in run_ranks(2, narrow_bodies, save_tiny(tmp_path, "qwen3")):
        for states, less in NARROW.items():
            bytes_of, elements = found[states]
            # what is small, and of 8 bits what is no multiple of a block, stays as it is
            assert less <= bytes_of[ADAM] / (8 * elements) < less + 0.15, states


def draws() -> list[float]:
    """Of each of the host's generators."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        float(torch.rand(())),
    ]


def host_body(world: Any, model: Path, folder: Path) -> None:
    actor = actor_of(model, P(tensor=2), PLAIN, "float32", 0.0)
    kept = kept_by(actor, folder)
    seeds.set_seed(world.rank + 5)
    draws()
    kept.save({}, step=1)
    expected = draws()
    seeds.set_seed(99)
    kept.load(folder / "step_000001")
    assert draws() == expected
    kept.load(folder / "step_000001", random=False)
    assert draws() != expected


def test_the_hosts_generators_go_on_where_they_stood(tmp_path: Path) -> None:
    run_ranks(2, host_body, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept")


def blind_body(world: Any, model: Path, folder: Path) -> None:
    actor = actor_of(model, P(tensor=2), PLAIN, "float32", 0.0)
    kept_by(actor, folder).save({"n": 1}, step=1)
    blind = kept_by(actor, folder if world.rank == 0 else folder / "another host's view of it")
    assert blind.resume() == {"n": 1}
    if world.rank == 0:
        retention.point_to(folder, "gone")
    torch.distributed.barrier()
    assert blind.resume() == {"n": 1}, "the newest whole one"
    torch.distributed.barrier()
    if world.rank == 0:
        (folder / "step_000001" / MANIFEST).unlink()
    torch.distributed.barrier()
    with pytest.raises(
        CheckpointError, match="names 'gone', which is no whole checkpoint. There is no whole one"
    ):
        blind.resume()


def test_the_first_process_says_for_all_what_is_resumed(tmp_path: Path) -> None:
    run_ranks(2, blind_body, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept")


def away_body(world: Any, model: Path, folder: Path, optimizer: OptimizerConfig) -> None:
    actor = actor_of(model, P(), optimizer, "bfloat16", 0.0)
    kept = kept_by(actor, folder)
    kept.save({}, step=1)
    saved = [item.parameter.detach().clone() for item in actor.manager.bound]
    learn(actor, 1)
    actor.manager.residency.only()
    kept.load(folder / "step_000001", optimizer=False)
    actor.manager.residency.on(*PARTS)
    kept.save({}, step=2)
    reader = training_files.TrainingReader(folder / "step_000002")
    for key in [key for key in reader.stored if "/main/" in key]:
        weights = key.replace("/main/", "/weights/")
        main, own = (
            torch.empty(reader.manifest["shapes"][key], dtype=reader.dtype_of(k))
            for k in (key, weights)
        )
        reader.fill(main, key, (0,) * main.dim())
        reader.fill(own, weights, (0,) * own.dim())
        assert torch.equal(main, own.float()), key
    assert all(
        torch.equal(item.parameter, before)
        for item, before in zip(actor.manager.bound, saved, strict=True)
    )


@pytest.mark.parametrize(
    "optimizer", [pytest.param(PLAIN, marks=pytest.mark.ranks), SHARDED], ids=["plain", "sharded"]
)
def test_weights_alone_are_loaded_where_nothing_is_on_the_device(
    optimizer: OptimizerConfig, tmp_path: Path
) -> None:
    run_ranks(1, away_body, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept", optimizer)


@pytest.mark.ranks
def test_a_run_goes_on_under_every_layout(tmp_path: Path) -> None:
    others = [
        (4, P(tensor=4), SHARDED),
        (4, P(pipeline=2), SHARDED),
        (4, P(), SHARDED),
        (4, P(), PLAIN),
        (2, P(pipeline=2, virtual_pipeline=2), PLAIN),
    ]
    expected, found = resumed(tmp_path, "qwen3", (4, P(tensor=2, pipeline=2), PLAIN), others)
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["qwen3-moe", "deepseek-v3", "qwen2-tied"])
def test_experts_latent_attention_and_tied_embeddings_come_back_from_a_sharded_optimizer(
    variant: str, tmp_path: Path
) -> None:
    tied = variant == "qwen2-tied"
    saved = (4, P(pipeline=2) if tied else P(expert=2), SHARDED)
    expected, found = resumed(
        tmp_path,
        variant,
        saved,
        [(2, P(), SHARDED), (2, P(tensor=2, sequence=not tied), PLAIN), saved],
    )
    for losses in found[:2]:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert found[2] == expected


@pytest.mark.ranks
def test_main_parameters_of_bfloat16_come_back_under_another_layout(tmp_path: Path) -> None:
    saved = (2, P(), SHARDED)
    expected, found = resumed(tmp_path, "qwen3", saved, [(1, P(), PLAIN), saved], dtype="bfloat16")
    # the first losses alone: bfloat16 rounds by 2**-8
    assert found[0] == pytest.approx(expected, rel=2e-2)
    assert found[1] == expected


# What is no whole checkpoint.


class Died(BaseException):
    """Stands for the end of the process: nothing catches it."""


STAGES: dict[str, tuple[Any, str]] = {
    "the ranks' tensors": (training_files, "write_pieces"),
    "a rank's note": (training_files, "write_json"),
    "the manifest": (training_files, "finish"),
    "its name": (retention, "settle"),
    "the pointer": (retention, "point_to"),
    "retention": (retention, "rotate"),
}


def died_body(world: Any, model: Path, folder: Path) -> None:
    actor = actor_of(model, P(), PLAIN, "float32", 0.0)
    learn(actor, 1)
    kept_by(actor, folder).save({"n": 0}, step=1)
    latest = 0
    for number, (stage, (module, name)) in enumerate(STAGES.items(), start=1):
        kept = kept_by(actor, folder, keep=2, asynchronous=True)
        original: Callable[..., Any] = getattr(module, name)

        def dies(*arguments: Any, original: Callable[..., Any] = original, **options: Any) -> None:
            raise Died

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, dies)
            patch.setattr("threading.excepthook", lambda arguments: None)
            kept.save({"n": number}, step=1)
            assert kept._writing is not None
            writing = kept._writing[1]
            writing._awaited.set()  # it writes without rests
            writing._part.join()
            writing._given_up.set()  # a process that is gone waits for nobody
            writing._whole.join()
        latest = number if stage == "retention" else latest
        again = kept_by(actor, folder)
        assert again.load(retention.find(folder, None)) == {"n": latest}, stage
    kept = kept_by(actor, folder, keep=2)
    kept.save({"n": 9}, step=2)
    assert kept.load(retention.find(folder, None)) == {"n": 9}
    assert (
        len(
            [
                path
                for path in folder.iterdir()
                if path.is_dir() and not path.name.endswith(retention.DRAFT)
            ]
        )
        == 2
    )


def test_a_save_that_dies_at_any_stage_leaves_the_one_before(tmp_path: Path) -> None:
    run_ranks(1, died_body, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def refused_body(world: Any, model: Path, other: Path, folder: Path) -> None:
    actor = actor_of(model, P(tensor=2), PLAIN, "float32", 0.0)
    learn(actor, 1)
    kept = kept_by(actor, folder)
    kept.save({"n": 1}, step=1)
    kept.save({"n": 2}, step=2)
    second = folder / "step_000002"
    offer = f"before it is {folder / 'step_000001'}: checkpoint.resume="
    manifest = json.loads((second / MANIFEST).read_bytes())
    piece = max(manifest["pieces"], key=lambda each: each["length"])
    damages = {
        piece["file"]: (piece["begin"] + piece["length"] // 2, "has checksum"),
        "rank_1.json": (-9, "its checksum is another"),
        MANIFEST: (
            (second / MANIFEST).read_text().index('"step": 2') + 8,
            "its checksum is another",
        ),
        **dict.fromkeys((".metadata", "common.pt", MARK), (-9, "its checksum is another")),
    }
    others = {path.name for path in second.iterdir()} - damages.keys()
    assert others == {
        "__0_0.distcp",
        "__1_0.distcp",
        "__objects.distcp",
        "rank_0.json",
        retention.MARK,
    } - {piece["file"]}
    for name, (at, reason) in damages.items():
        if world.rank == 0:
            flip(second / name, at)
        torch.distributed.barrier()
        # on both ranks, whoever reads it
        with pytest.raises(CheckpointError, match=reason) as raised:
            kept.load(second)
        assert str(second / name) in str(raised.value) and offer in str(raised.value), raised.value
        torch.distributed.barrier()
        if world.rank == 0:
            flip(second / name, at)
        torch.distributed.barrier()
    assert kept.load(second) == {"n": 2}
    stranger = actor_of(other, P(tensor=2), PLAIN, "float32", 0.0)
    with pytest.raises(
        CheckpointError, match=r"another model: vocab_size is 131 there and 97 in"
    ) as raised:
        kept_by(stranger, folder).load(second)
    torch.distributed.barrier()
    if world.rank == 0:
        (second / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    torch.distributed.barrier()
    with pytest.raises(
        CheckpointError,
        match=rf"is of format 99; this version reads 2, 3, 4, 5 and {FORMAT}. Take a newer rftmega. The one before",
    ):
        kept.load(second)
    torch.distributed.barrier()
    if world.rank == 0:
        older = {name: said for name, said in manifest.items() if name != "seal"} | {"format": 5}
        (second / MANIFEST).write_text(json.dumps(older | {"seal": seal(older)}))
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="of format 5, whose tensors have names of Megatron"):
        kept.load(second)


def test_what_is_not_as_it_was_written_is_refused_with_the_reason_and_the_one_before_is_offered(
    tmp_path: Path,
) -> None:
    models = [
        save_tiny(tmp_path / name, "qwen3", vocab_size=words)
        for name, words in (("model", 131), ("other", 97))
    ]
    run_ranks(2, refused_body, *models, tmp_path / "kept")


def full_disk_body(world: Any, model: Path, folder: Path) -> None:
    actor = actor_of(model, P(tensor=2), PLAIN, "float32", 0.0)
    kept_by(actor, folder).save({"n": 1}, step=1)

    def begin(
        folder: Path, name: str, original: Callable[[Path, str], Path] = retention.begin
    ) -> None:
        draft = original(folder, name)
        (draft / "__1_0.distcp.part").symlink_to("/dev/full")  # the disk of the second rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "begin", begin)
        kept = kept_by(actor, folder, asynchronous=True)
        kept.save({"n": 2}, step=2)
        learn(actor, 1)
        with pytest.raises(
            CheckpointError,
            match=r"rank 1: .*No space left on device.*latest is still step_000001. Make room",
        ):
            kept.save({"n": 3}, step=3)
        kept_by(actor, folder, warn=True).save({"n": 4}, step=4)  # trains on
    kept = kept_by(actor, folder, warn=True)
    kept.save({"n": 5}, step=5)
    assert kept.load(retention.find(folder, None)) == {"n": 5}
    torch.distributed.barrier()
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest",
        "step_000001",
        "step_000005",
    ]
    nowhere = Path("/sys/kernel/checkpoints")  # nobody may write there, root neither
    with pytest.raises(
        CheckpointError, match=r"can't be written: .*(Permi|permi).*There is none yet"
    ):
        kept_by(actor, nowhere).save({}, step=1)


def test_a_full_disk_and_a_read_only_folder_are_told_and_training_goes_on_where_it_may(
    tmp_path: Path,
) -> None:
    run_ranks(2, full_disk_body, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept")


def full_while_exporting_body(world: Any, model: Path, folder: Path) -> None:
    """The disk of the first process is full after two tensors, of which the second process holds
    halves.
    """
    actor = actor_of(model, P(tensor=2), PLAIN, "float32", 0.0)
    kept_by(actor, folder).save({"n": 1}, step=1)
    export = partial(export_model, actor, trainer=TrainerConfig(push_bucket_mib=1))
    written = count()

    def write_all(stream: Any, tensor: torch.Tensor) -> None:
        if next(written) % 3 == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_folder, "write_all", write_all)
        with pytest.raises(
            CheckpointError,
            match=r"can't be exported to .*No space left on device.*latest is still step_000001",
        ):
            kept_by(actor, folder, export=export).save({"n": 2}, step=2)
        kept = kept_by(actor, folder, warn=True, export=export)
        kept.save({"n": 3}, step=3)
        learn(actor, 1)
    torch.distributed.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_000001"]
    torch.distributed.barrier()  # before the next draft
    kept.save({"n": 4}, step=4)
    kept.wait()
    torch.distributed.barrier()
    whole = folder / "step_000004"
    assert kept.load(retention.find(folder, None)) == {"n": 4}
    assert {"hf", "hf_ema"} <= {path.name for path in whole.iterdir()}
    assert (
        load_file(whole / "hf/model-00001-of-00001.safetensors").keys()
        == load_file(model / "model.safetensors").keys()
    )


def test_an_export_beside_a_checkpoint_that_fails_is_told_and_training_goes_on_where_it_may(
    tmp_path: Path,
) -> None:
    run_ranks(
        2, full_while_exporting_body, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept"
    )


def otherwise_body(world: Any, model: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What is said when a run goes on with another learning rate and another commit."""
    actor = actor_of(model, P(), PLAIN, "float32", 0.0)
    kept = kept_by(actor, folder)
    kept._code = kept._code and kept._code | {"commit": "an earlier one"}
    kept.inputs = {"data.train": {"rows": 4, "sha256": "a" * 64}}
    kept.save({}, step=1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    saving.log.addHandler(handler)
    saving.log.setLevel(logging.INFO)
    actor.manager.cfg.optimizer.learning_rate = 0.5
    again = kept_by(actor, folder)
    again.inputs = {"data.train": {"rows": 3, "sha256": "b" * 64}}
    again.resume()
    return said, again._code


def test_what_is_otherwise_than_when_it_was_saved_is_said_by_the_first_process(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kept"
    (said, code), (nothing, _) = run_ranks(
        2, otherwise_body, save_tiny(tmp_path / "model", "qwen3"), folder
    )
    assert said == [
        f"resumed from {folder / 'step_000001'}",
        "  optimizer.learning_rate: 0.01 -> 0.5",
        "  data.train: 4 rows, sha256 aaaaaaaaaaaa -> 3 rows, sha256 bbbbbbbbbbbb",
        *([f"  commit: an earlier one -> {code['commit'] or json.dumps('')}"]),
    ]
    assert nothing == []
    assert code["torch"] == torch.__version__
