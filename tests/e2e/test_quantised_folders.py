"""Published folders of quantised weights, and of PyTorch's own files, from the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rftmega.core.json_files import read_json_object
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.models.kernels import block_scaled, mxfp4
from rftmega.tools import convert
from tests.block_scales import quantise_folder
from tests.e2e.conftest import Run, numbers_of
from tests.packed_weights import pack_folder
from tests.tiny_decoders import save_decoder
from tests.tiny_models import save_tiny

GPT_OSS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
                           "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip


def with_tokenizer(arithmetic: Path, folder: Path) -> Path:
    """`folder`, with the tokenizer of the arithmetic world."""
    AutoTokenizer.from_pretrained(arithmetic / "model").save_pretrained(folder)
    return folder


def folder_of(kind: str, arithmetic: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder in the format MXFP4 or FP8, and the tensors that it means."""
    size = len(AutoTokenizer.from_pretrained(arithmetic / "model"))
    if kind == "mxfp4":
        plain = save_decoder(folder / "plain", "gpt-oss", vocab_size=size, **GPT_OSS)
        means = pack_folder(with_tokenizer(arithmetic, plain), folder / "quantised")
    else:
        plain = save_tiny(folder / "plain", "deepseek-v3", vocab_size=size)
        means = quantise_folder(with_tokenizer(arithmetic, plain), folder / "quantised", (16, 16))
        with_tokenizer(arithmetic, folder / "quantised")
    return folder / "quantised", means


def nearest(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is read of a weight that was written as MXFP4 [E, C, R] or FP8 in blocks of 16 x 16."""
    if weight.dim() == 3:
        read = [mxfp4.dequantised(*mxfp4.quantise(expert.T)).T for expert in weight]
        return torch.stack(read).to(dtype)
    numbers, scales = block_scaled.quantise(weight, 16, 16)
    return block_scaled.dequantised(numbers, scales, 16, 16).to(dtype)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("mxfp4", "fsdp"),
        ("fp8", "fsdp"),
        ("mxfp4", "megatron"),
    ],
)
def test_a_quantised_folder_trains_as_its_plain_copy_and_is_written_either_way(
    kind: str, backend: str, arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    source, means = folder_of(kind, arithmetic, tmp_path)
    assert convert.main(["to-plain", str(source), str(tmp_path / "copy")]) == 0
    copy = load_file(next((tmp_path / "copy").glob("*.safetensors")))
    assert copy.keys() == means.keys()
    assert all(torch.equal(copy[name], means[name].to(copy[name].dtype)) for name in copy)
    assert "quantization_config" not in read_json_object(tmp_path / "copy/config.json")
    AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    given = [f"backend={backend}", "rollout.engine=transformers", "trainer.steps=2", "trainer.export=true",
             "model.dtype=float32", "algorithm.kl.coef=0", "data.eval="]  # fmt: skip
    runs = {"quantised": [source, "trainer.export_quantised=true"], "copy": [tmp_path / "copy"]}
    for name, (model, *more) in runs.items():
        out = f"trainer.output={tmp_path / 'runs' / name}"
        done = train(arithmetic / "run.yaml", *given, f"model.path={model}", out, *more)
        assert done.returncode == 0, done.stderr
    theirs, ours = (numbers_of(tmp_path / "runs" / name) for name in ("copy", "quantised"))
    assert theirs == ours
    exported, plain = tmp_path / "runs/quantised/policy", tmp_path / "runs/copy/policy"
    config = read_json_object(exported / "config.json")
    assert (
        config["quantization_config"]
        == read_json_object(source / "config.json")["quantization_config"]
    )
    assert set(HFFolder(exported).names) == set(HFFolder(source).names), "stored otherwise"
    read, wanted = open_quantised(exported, config), load_file(next(plain.glob("*.safetensors")))
    assert set(read.names) == set(wanted)
    stored = set(HFFolder(source).names)
    quantised = {name for name in wanted if name not in stored or f"{name}_scale_inv" in stored}
    assert quantised
    moved = 0
    for name, tensor in wanted.items():
        found = read.whole(name, tuple(tensor.shape))
        assert torch.equal(found, nearest(tensor, found.dtype) if name in quantised else tensor), (
            name
        )
        moved += not torch.equal(tensor, means[name].float())
    assert moved > len(wanted) / 2, "little was learnt"


def test_pytorchs_own_files_are_refused_with_the_command_that_converts_them(
    arithmetic: Path, tmp_path: Path, train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(arithmetic / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    done = train(arithmetic / "run.yaml", f"model.path={folder}", "--dry-run")
    assert done.returncode == 2
    assert f"Convert them: rftmega convert to-plain {folder} OUT" in done.stderr
    assert convert.main(["to-plain", str(folder), str(tmp_path / "out")]) == 0
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not list((tmp_path / "out").glob("*.bin"))
    done = train(arithmetic / "run.yaml", f"model.path={tmp_path / 'out'}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert convert.main(["to-plain", str(tmp_path / "out"), str(tmp_path / "again")]) == 2
    assert "plain safetensors weights already" in capsys.readouterr().err
    torch.save({"optimizer": [1, 2]}, folder / "pytorch_model.bin")
    assert convert.main(["to-plain", str(folder), str(tmp_path / "other")]) == 2
    assert "no dictionary of tensors" in capsys.readouterr().err
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    assert convert.main(["to-plain", str(folder), str(tmp_path / "another")]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_pytorchs_own_files_in_several_parts_are_read_by_their_index(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    of_file = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(of_file.values()):
        torch.save({n: tensors[n] for n in names if of_file[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": of_file}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert convert.main(["to-plain", str(folder), str(tmp_path / "out")]) == 0
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
