"""A run on another backend than Megatron's: the same strategy, pushes, checkpoints and export."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import metrics_of
from tests.e2e.test_loop import assert_memory_as_predicted
from tests.plain_backend import PlainBackend
from tests.ranks import run_ranks

COMPARED = ("loss", "reward", "grad_norm", "entropy", "reference_kl", "learning_rate")
ENGINE = ("rollout.engine=transformers", "trainer.export=true", "trainer.eval_every=0")


def run_body(world: object, config: Path, backend: str, *options: str) -> None:
    import train_rl
    from rftmega.run import train
    from rftmega.runtime.parallel import process_group

    with pytest.MonkeyPatch.context() as patch:
        if backend == "plain":
            patch.setattr(train, "built_backend", lambda config: PlainBackend())
        patch.setattr(process_group, "start", lambda **_: nullcontext(world))
        patch.setattr(sys, "argv", ["train_rl.py", str(config), *ENGINE, *options])
        assert train_rl.main() == 0


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(output) if "loss" in line]


@pytest.mark.parametrize(
    ("another", "processes"), [pytest.param("plain", 1, marks=pytest.mark.ranks), ("fsdp", 2)]
)
def test_another_backend_trains_pushes_saves_and_resumes_as_megatron_does(
    another: str, processes: int, arithmetic: Path, tmp_path: Path
) -> None:
    config = arithmetic / "run.yaml"

    def run(backend: str, *options: str) -> Path:
        output = tmp_path / backend
        given = (f"trainer.output={output}", "checkpoint.every=1", *options)
        if backend == "fsdp":
            given = ("backend=fsdp", *given)
        count = processes if backend == another else 1
        run_ranks(count, run_body, config, backend, *given, timeout=200)
        return output

    run(another, "trainer.steps=2")
    theirs = run(another, "checkpoint.resume=auto", "trainer.steps=3")
    megatron = run("megatron", "trainer.steps=3")
    seen, wanted = steps_of(theirs), steps_of(megatron)
    assert [line["step"] for line in seen] == [line["step"] for line in wanted]
    for line, expected in zip(seen, wanted, strict=True):
        for name in COMPARED:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        if another == "fsdp":
            assert_memory_as_predicted(line)
    exports = [load_file(next(folder.rglob("model*.safetensors"))) for folder in (theirs, megatron)]
    weights, expected = exports
    assert weights.keys() == expected.keys()
    start = load_file(arithmetic / "model" / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-4, atol=1e-5), name
    assert not torch.equal(weights["lm_head.weight"], start["lm_head.weight"]), "nothing was learnt"


@pytest.mark.ranks
def test_a_run_that_was_saved_under_megatron_goes_on_under_fsdp(
    arithmetic: Path, tmp_path: Path
) -> None:
    config, kept = arithmetic / "run.yaml", ("checkpoint.every=1", "checkpoint.resume=auto")
    whole, two = (f"trainer.output={tmp_path / name}" for name in ("whole", "two"))
    run_ranks(1, run_body, config, "megatron", whole, "trainer.steps=3", timeout=200)
    run_ranks(1, run_body, config, "megatron", two, *kept, "trainer.steps=2", timeout=200)
    options = (two, *kept, "trainer.steps=3", "backend=fsdp")
    run_ranks(2, run_body, config, "fsdp", *options, timeout=200)
    seen, wanted = steps_of(tmp_path / "two"), steps_of(tmp_path / "whole")
    assert [line["step"] for line in seen] == [line["step"] for line in wanted]
    for line, expected in zip(seen, wanted, strict=True):
        for name in COMPARED:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
