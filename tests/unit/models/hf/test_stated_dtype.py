"""The config.json of a written folder states the dtype of its tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.models.hf.hf_folder import PlannedTensor, copy_companions

LARGE, SMALL = (96, 32), (32,)


def stated(
    folder: Path, given: dict[str, Any], **tensors: tuple[torch.dtype, tuple[int, ...]]
) -> Any:
    """Writes config.json beside tensors, name -> (dtype, shape); returns its content and what is told."""
    source, target = folder / "source", folder / "target"
    for each in (source, target):
        each.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "gemma2"} | given))
    planned = [PlannedTensor(name, *kind) for name, kind in tensors.items()]
    shards = {"a": planned[:1], "b": planned[1:]} if planned else {}
    said = copy_companions(source, target, shards)
    content = json.loads((target / "config.json").read_text())
    content.pop("model_type")
    return content, said


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"dtype": "bfloat16", "hidden_size": 8}, {"dtype": "float32", "hidden_size": 8}),
        ({"torch_dtype": "float16"}, {"torch_dtype": "float32"}),
        ({"dtype": None}, {"dtype": "float32"}),
        ({}, {"dtype": "float32"}),
        (
            {
                "dtype": "bfloat16",
                "text_config": {"dtype": "bfloat16", "x": 3},
                "vision_config": {"torch_dtype": "bfloat16"},
                "audio_config": {"x": 5},
            },
            {
                "dtype": "float32",
                "text_config": {"dtype": "float32", "x": 3},
                "vision_config": {"torch_dtype": "float32"},
                "audio_config": {"x": 5},
            },
        ),
    ],
)
def test_the_dtype_is_that_of_the_tensors_whatever_it_was(
    given: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    # more tensors, but fewer bytes, have another dtype
    few = {f"bias{number}": (torch.bfloat16, SMALL) for number in range(3)}
    content, said = stated(tmp_path, given, weight=(torch.float32, LARGE), **few)
    assert content == wanted
    assert said == "config.json says float32, the dtype of the written weights"


def test_a_dtype_that_is_so_is_no_change(tmp_path: Path) -> None:
    content, said = stated(tmp_path, {"dtype": "bfloat16"}, weight=(torch.bfloat16, LARGE))
    assert (content, said) == ({"dtype": "bfloat16"}, None)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e4m3fn])
def test_quantised_tensors_are_no_dtype_of_a_model(kind: torch.dtype, tmp_path: Path) -> None:
    content, said = stated(tmp_path, {"dtype": "bfloat16"}, weight=(kind, LARGE))
    assert (content, said) == ({"dtype": "bfloat16"}, None)


def test_a_folder_without_such_tensors_keeps_its_config(tmp_path: Path) -> None:
    assert stated(tmp_path, {"dtype": "bfloat16"}) == ({"dtype": "bfloat16"}, None)
