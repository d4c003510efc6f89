"""The command lines of tools/, as a user types them."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from rftmega.runtime.parallel.folder_lock import FILE, Holder
from rftmega.tools import convert, inspect_checkpoint
from tests.e2e.conftest import ROOT
from tests.tiny_models import save_tiny
from tests.warm_command import run_warm


def test_convert_verify_inspect_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    dead = Holder("conversion", "node07", "another boot", 7, 1, "yesterday", "its own")
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / FILE).write_text(json.dumps(asdict(dead)))
    os.utime(tmp_path / "megatron" / FILE, (1, 1))
    given = [str(source), str(tmp_path / "megatron"), "--tp", "2", "--verify"]
    there = run_warm(ROOT / "tools/convert.py", ["to-megatron", *given], folder=ROOT, timeout=240)
    assert there.returncode == 0, there.stderr
    assert "took over the lock of another conversion, process 7 on node07" in there.stderr
    others = [
        line
        for line in there.stderr.splitlines()
        if line and "took over" not in line and "to Megatron" not in line
    ]
    assert not [line for line in others if "arn" in line], "of libraries"
    assert "tensors are equal, byte by byte" in there.stdout
    assert convert.main(["verify", str(source), str(tmp_path / "megatron"), "--logits"]) == 0
    assert float(capsys.readouterr().out.split("logits differ by ")[1].split()[0]) < 1e-5
    assert inspect_checkpoint.main([str(tmp_path / "megatron"), "--tensors", "--check"]) == 0
    listed = capsys.readouterr().out
    assert "checksums   all as in the manifest" in listed
    assert "decoder.layers.self_attention.linear_qkv.weight" in listed
    assert (
        convert.main(["to-hf", str(tmp_path / "megatron"), str(tmp_path / "back"), "--verify"]) == 0
    )


def test_a_folder_that_is_none_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main(["to-hf", str(tmp_path), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "holds no config.json" in said
    assert not (tmp_path / "out").exists()
