"""The command lines of tools/, as a user types them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from rftmega.runtime.parallel.folder_lock import FILE, Holder
from rftmega.tools import convert, inspect_checkpoint
from tests.e2e.conftest import ROOT
from tests.tiny_models import save_tiny


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"tools/{name}.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240
    )


def test_convert_verify_inspect_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    dead = Holder("conversion", "node07", "another boot", 7, 1, "yesterday", "its own")
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / FILE).write_text(json.dumps(asdict(dead)))
    os.utime(tmp_path / "megatron" / FILE, (1, 1))
    there = tool("convert", "to-megatron", source, tmp_path / "megatron", "--tp", 2, "--verify")
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


def test_a_folder_that_is_none_is_one_clear_error(tmp_path: Path) -> None:
    done = tool("convert", "to-hf", tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "holds no config.json" in done.stderr
    assert not (tmp_path / "out").exists()
