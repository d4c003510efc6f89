"""The command lines of tools/, as a user types them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rftmega.parallel.folder_lock import FILE, Holder
from tests.e2e.conftest import ROOT
from tests.tiny_models import save_tiny


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"tools/{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)


def test_convert_verify_inspect_and_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen3")
    dead = Holder("conversion", "node07", "another boot", 7, 1, "yesterday", "its own")
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / FILE).write_text(json.dumps(asdict(dead)))
    os.utime(tmp_path / "megatron" / FILE, (1, 1))
    there = tool("convert", "to-megatron", source, tmp_path / "megatron", "--tp", 2, "--verify")
    assert there.returncode == 0, there.stderr
    assert "took over the lock of another conversion, process 7 on node07" in there.stderr
    others = [line for line in there.stderr.splitlines() if line and "took over" not in line and "to Megatron" not in line]
    assert not [line for line in others if "arn" in line], "of libraries"
    assert "tensors are equal, byte by byte" in there.stdout
    compared = tool("convert", "verify", source, tmp_path / "megatron", "--logits")
    assert compared.returncode == 0, compared.stderr
    assert float(compared.stdout.split("logits differ by ")[1].split()[0]) < 1e-5
    listed = tool("inspect_checkpoint", tmp_path / "megatron", "--tensors", "--check")
    assert listed.returncode == 0, listed.stderr
    assert "checksums   all as in the manifest" in listed.stdout
    assert "decoder.layers.self_attention.linear_qkv.weight" in listed.stdout
    back = tool("convert", "to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    assert back.returncode == 0, back.stderr


def test_a_folder_that_is_none_is_one_clear_error(tmp_path: Path) -> None:
    done = tool("convert", "to-hf", tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "holds no config.json" in done.stderr
    assert not (tmp_path / "out").exists()
