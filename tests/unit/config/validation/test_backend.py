"""Options of one backend under the other."""

from pathlib import Path

import pytest

from rftmega.config import load
from rftmega.config.validation.backend import backend

GAE = "algorithm.advantage=gae"


def reasons(folder: Path, *options: str, processes: int = 4) -> list[str]:
    (folder / "run.yaml").write_text("model: {path: x}")
    return backend(load(folder / "run.yaml", list(options)), processes)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("parallel.pipeline=2", "parallel.pipeline=2 needs backend=megatron"),
        ("parallel.context=2", "parallel.context=2 needs backend=megatron"),
        ("parallel.recompute=selective", "Set it to full"),
        ("parallel.replicas=3", "does not divide the 4 launched processes"),
        ("optimizer.distributed=false", "always shards the optimizer"),
        ("optimizer.vision_learning_rate=1", "one learning rate"),
        ("model.dropout=0.1", "model.dropout=0.1 needs backend=megatron"),
        ("critic.parallel.expert=2", "critic.parallel.expert=2 needs backend=megatron"),
        ("critic.parallel.replicas=3", "critic.parallel.replicas=3 does not divide"),
    ],
)
def test_what_is_megatrons_is_refused_under_fsdp(option: str, said: str, tmp_path: Path) -> None:
    found = reasons(tmp_path, "backend=fsdp", GAE, option)
    assert any(said in reason for reason in found), found
    assert reasons(tmp_path, "backend=fsdp", GAE) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model.dtype=float32"], "multiplies bfloat16 in 8 bits, not model.dtype=float32"),
        (["parallel.recompute=full"], "with parallel.recompute=full is not supported"),
        ([GAE, "critic.parallel.recompute=full"], "with critic.parallel.recompute=full"),
        (["backend=fsdp"], "model.fp8=mxfp8 needs backend=megatron"),
    ],
)
def test_what_products_of_8_bits_do_not_go_with_is_refused(
    options: list[str], said: str, tmp_path: Path
) -> None:
    (found,) = reasons(tmp_path, "model.fp8=mxfp8", *options)
    assert said in found
    assert reasons(tmp_path, "model.fp8=mxfp8", "parallel.recompute=selective") == []


@pytest.mark.parametrize(
    "option", ["replicas=2", "reshard_after_forward=false", "cpu_offload=true"]
)
def test_what_is_fsdps_is_refused_under_megatron(option: str, tmp_path: Path) -> None:
    for section in ("parallel", "critic.parallel"):
        found = reasons(tmp_path, GAE, f"{section}.{option}")
        assert any(f"{section}.{option.split('=')[0]}=" in reason for reason in found), found
        assert reasons(tmp_path, GAE, f"{section}.{option}", "backend=fsdp") == []
