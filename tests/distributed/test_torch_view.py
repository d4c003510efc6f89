"""Each patch of the view of torch is needed: without it, unmodified megatron-core fails on a CPU."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from rftmega.device.torch_view import PATCHES, install
from tests.tiny_models import save_tiny

ROOT = Path(__file__).parents[2]
BETWEEN_STAGES = {"streams", "tensor_cuda", ""}  # these only matter where there are two stages (tied embeddings included)


def train(folder: Path, meeting: Path, *, without: str) -> str:
    """What the ranks said."""
    stages = 2 if without in BETWEEN_STAGES else 1
    script = Path(__file__).with_name("without_patch.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), without, str(folder), str(meeting), str(rank), str(stages)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(stages)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    if not without:
        assert all("trained" in text for text in said), said
    return "\n".join(said)


@pytest.mark.parametrize("patch", ["", *PATCHES])
def test_without_a_patch_training_fails_and_with_all_it_works(patch: str, tmp_path: Path) -> None:
    said = train(save_tiny(tmp_path / "model", "qwen2-tied"), tmp_path / "meeting", without=patch)
    if patch:
        assert "trained" not in said
        assert "cuda" in said.lower() or "forked generators" in said or "TypeError" in said, said


def test_the_real_torch_is_left_alone() -> None:
    assert not install()  # a second call does nothing
    assert torch.cuda.current_device.__module__.startswith("torch.cuda")
    assert isinstance(torch.zeros, types.BuiltinFunctionType)
    assert "torch_view" not in getattr(torch.Tensor.type, "__module__", "")


def test_it_refuses_to_come_too_late() -> None:
    late = "import megatron.core\nfrom rftmega.device import torch_view\ntorch_view.install()"
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "was imported before rftmega" in done.stderr
