"""A folder of safetensors files: what would be read for something else is refused, by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.backends.megatron.load import HEAD, refuse_strangers
from rftmega.converters import left_out, table, written
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.hf_folder import INDEX, HFFolder, copy_companions
from rftmega.models.hf.stacked_files import open_folder
from tests.tiny_models import VARIANTS, save_tiny, with_predictor
from tests.tiny_vision import save_tiny_vision


def check(folder: Path) -> None:
    """As a start and a conversion do."""
    hf_config = read_hf_config(folder)
    allowed = frozenset({HEAD} if hf_config.get("tie_word_embeddings") else ())
    files = open_folder(folder, hf_config)
    refuse_strangers(files, table(hf_config), hf_config, experts=8, allowed=allowed)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_layer_behind_the_last_is_refused(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    check(folder)
    change_config(folder, num_hidden_layers=3)
    if layer_types := read_hf_config(folder).get("layer_types"):
        change_config(folder, layer_types=layer_types[:3])
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.3\..* Some are of layer 3, and num_hidden_layers=3"
    ):
        check(folder)


def test_qwen3_5_s_layers_that_predict_a_second_token_are_left_out_and_not_written(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "qwen3.5")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.ones(64, 128)}, folder / "model.safetensors")
    change_config(folder, mtp_num_hidden_layers=1)
    check(folder)
    fields = read_hf_config(folder)
    assert left_out(fields, HFFolder(folder).names) == {"mtp.fc.weight"}
    assert written(fields) == {"mtp_num_hidden_layers": 0}


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_layers_that_predict_a_second_token_are_counted_out_in_the_section_of_the_text_model(
    kind: str, tmp_path: Path
) -> None:
    folder = save_tiny_vision(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {"mtp_num_hidden_layers": 1, "head_dim": 16}
    change_config(folder, text_config=text)
    target = tmp_path / "export"
    target.mkdir()
    said = copy_companions(folder, target, {})
    assert said is not None and "text_config.mtp_num_hidden_layers=0" in said
    assert "head_dim" not in said
    config["text_config"] = text | {"mtp_num_hidden_layers": 0}
    assert json.loads((target / "config.json").read_text()) == config


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe"])
def test_a_layer_that_predicts_a_second_token_is_left_out_and_told(
    variant: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    added = with_predictor(folder, 4)
    check(folder)
    assert sorted(left_out(read_hf_config(folder), HFFolder(folder).names)) == added


@pytest.mark.parametrize(
    ("layer", "config", "complaint"),
    [
        (4, {"num_hidden_layers": 3}, r"model\.layers\.3\."),
        (4, {"num_hidden_layers": 3, "num_nextn_predict_layers": 2}, r"model\.layers\.3\."),
        (4, {"num_nextn_predict_layers": 0}, r"model\.layers\.4\."),
        (5, {}, r"model\.layers\.5\."),
    ],
)
def test_of_layers_behind_the_last_only_those_that_predict_are_left_out(
    layer: int, config: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "deepseek-v3")
    with_predictor(folder, layer)
    change_config(folder, **config)
    with pytest.raises(CheckpointError, match=complaint):
        check(folder)


def test_a_tensor_that_a_predicting_layer_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "deepseek-v3")
    with_predictor(folder, 4)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.layers.4.adapter.weight": torch.ones(2)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"1 tensor.*model\.layers\.4\.adapter\.weight"):
        check(folder)


def test_a_folder_without_those_layers_says_that_it_has_none(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "deepseek-v3")
    (source / "config.json").chmod(0o444)
    (tmp_path / "target").mkdir()
    said = copy_companions(source, tmp_path / "target", {})
    assert said is not None
    assert "num_nextn_predict_layers=0" in said
    before, after = read_hf_config(source), read_hf_config(tmp_path / "target")
    assert before | {"num_nextn_predict_layers": 0} == after
    (tmp_path / "again").mkdir()
    assert copy_companions(tmp_path / "target", tmp_path / "again", {}) is None


def test_two_files_that_hold_the_same_tensor_are_refused_without_an_index(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "later.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"later\.safetensors and model\.safetensors both hold 'model\.norm\.weight'",
    ):
        HFFolder(folder)
    names = load_file(folder / "model.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    )
    assert HFFolder(folder).whole("model.norm.weight", (64,)).any()


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.int64, "I64"), (torch.complex64, "C64"),
     (torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2")],
)  # fmt: skip
def test_weights_that_are_no_floating_point_numbers_are_refused_by_name(
    dtype: torch.dtype, said: str, tmp_path: Path
) -> None:
    save_file({"model.norm.weight": torch.ones(64).to(dtype)}, tmp_path / "model.safetensors")
    files = HFFolder(tmp_path)
    for read in (files.slice_of, files.whole):
        with pytest.raises(
            CheckpointError,
            match=rf"model\.norm\.weight is of dtype {said}; weights are F64, F32, F16, BF16",
        ):
            read("model.norm.weight", (64,))


def test_a_table_of_whole_numbers_is_not_called_a_quantised_weight(tmp_path: Path) -> None:
    table = torch.arange(300, dtype=torch.int64)
    save_file({"gate.tid2eid": table}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a table of tokens or experts") as raised:
        HFFolder(tmp_path).slice_of("gate.tid2eid", (300,))
    assert "convert" not in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_a_table_is_read_as_it_is_where_the_model_has_one_and_weights_are_none(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    table = torch.arange(300).remainder(7).to(dtype)
    save_file({"table": table, "weight": torch.ones(300)}, tmp_path / "model.safetensors")
    files = HFFolder(tmp_path)
    for integers in (True, None):
        found = files.whole("table", (300,), integers=integers)
        assert found.dtype == dtype and torch.equal(found, table)
        assert torch.equal(files.slice_of("table", (300,), integers=integers)[:9], table[:9])
    with pytest.raises(CheckpointError, match="the model has a table of whole numbers there"):
        files.whole("weight", (300,), integers=True)
    assert torch.equal(files.whole("weight", (300,), integers=None), torch.ones(300))


@pytest.mark.parametrize("integers", [True, False, None])
def test_numbers_of_8_bits_with_a_point_are_neither_weights_nor_a_table(
    integers: bool | None, tmp_path: Path
) -> None:
    save_file({"a": torch.ones(8).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="of dtype F8_E4M3"):
        HFFolder(tmp_path).dtype_of("a", integers=integers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_other_precisions_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64, dtype=dtype)}, tmp_path / "model.safetensors")
    assert torch.equal(
        HFFolder(tmp_path).whole("model.norm.weight", (64,)), torch.ones(64, dtype=dtype)
    )


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (b"garbage", r"index\.json:1: not JSON"),
        (b"{}", r"index\.json is no index of weights: its weight_map is null"),
        (b"[1]", r"index\.json holds a list"),
        (b'{"weight_map": {}}', r"its weight_map is empty"),
        (b'{"weight_map": {"a": 1}}', r"names '1' for 'a', which is no \*\.safetensors file"),
        (
            b'{"weight_map": {"a": "../model.safetensors"}}',
            r"names '\.\./model\.safetensors' for 'a'",
        ),
        (
            b'{"weight_map": {"a": "model.safetensors", "a": "b.safetensors"}}',
            r"the key 'a' is there twice",
        ),
    ],
)
def test_an_index_that_is_none_is_refused(index: bytes, complaint: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    (folder / INDEX).write_bytes(index)
    with pytest.raises(CheckpointError, match=complaint):
        HFFolder(folder)


def test_an_index_that_names_a_missing_file_or_a_tensor_of_another_is_refused(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "llama")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors", "b": "model.safetensors"}})
    )
    files = HFFolder(folder)
    with pytest.raises(CheckpointError, match=r"gone\.safetensors can't be read"):
        files.whole("a", (1,))
    with pytest.raises(
        CheckpointError, match=r"names model\.safetensors for 'b', which is not in that file"
    ):
        files.whole("b", (1,))


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        # safetensors takes one of them
        ('{"a": ONE, "a": ONE}', "the header is the key 'a' is there twice"),
        ('{"a": ONE, "b": TWO}', "can't be read: .*"),  # behind the end of the file
        ('{"a": ONE', "can't be read: .*"),
        ("", "can't be read: .*"),
    ],
)
def test_a_header_of_weights_that_is_none_is_refused(
    header: str, complaint: str, tmp_path: Path
) -> None:
    places = {"ONE": [0, 8], "TWO": [8, 16]}
    for name, offsets in places.items():
        header = header.replace(
            name, json.dumps({"dtype": "F32", "shape": [2], "data_offsets": offsets})
        )
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    )
    with pytest.raises(CheckpointError, match=rf"model\.safetensors:? {complaint}"):
        HFFolder(tmp_path).whole("a", (2,))


def test_a_header_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read"):
        HFFolder(folder)
