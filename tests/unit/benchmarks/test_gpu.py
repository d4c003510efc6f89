"""The benchmark of one GPU, at small sizes on a CPU: every part's rows are measured and written at
once.
"""

import importlib
import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.completions import agreement
from benchmarks.gpu.loop import environment, summary
from benchmarks.gpu.models import TINY, TINY_MOE, save_zeros
from benchmarks.gpu.parts import PARTS, Part, missing
from benchmarks.gpu.sheet import Sheet
from rftmega.core.types import Completion
from rftmega.runtime import device
from rftmega.runtime.device import CUDA
from tests.imitation_cuda import imitated
from tests.ranks import TRANSFORMER_ENGINE, run_ranks
from tests.tiny_audio import tokenizer
from tests.tiny_models import save_tiny

ROOT = Path(__file__).parents[3]


def parts_body(world: Any, target: Path, names: list[str]) -> None:
    for name in names:
        module: Any = importlib.import_module(f"benchmarks.gpu.{PARTS[name].module}")
        sizes = PARTS[name].sizes(small=True)
        module.measure(world, Sheet(target / f"{name}.json", sizes._asdict()), sizes)


def found_by(target: Path, names: list[str], **how: Any) -> dict[str, dict[str, Any]]:
    run_ranks(1, parts_body, target, names, **how)
    found = {name: json.loads((target / f"{name}.json").read_text()) for name in names}
    for name in names:
        assert list(found[name]) == ["machine", "settings", "rows"]
        assert found[name]["machine"]["device"] == "cpu"
        assert sorted(found[name]["rows"]) == sorted(PARTS[name].rows)
        assert not any(
            "error" in row or "skipped" in row for row in found[name]["rows"].values()
        ), found[name]["rows"]
    return {name: found[name]["rows"] for name in names}


def test_every_part_that_needs_torch_and_megatron_alone_fills_its_rows(tmp_path: Path) -> None:
    rows = found_by(tmp_path, ["log_probs", "offload", "push", "mfu_fsdp"])
    both = rows["log_probs"]["fused against dense"]
    assert all(
        both[f"{what}_difference"] < 1e-5
        for what in ("logp", "entropy", "hidden_gradient", "weight_gradient")
    )
    assert both["memory_ratio"] is None, "a CPU keeps no record of its peak"
    cycles = rows["offload"]["three cycles"]
    assert (cycles["cycles"], cycles["equal"]) == (3, 3)
    assert rows["offload"]["off and on"]["off_gb_s"] > 0
    for name, tensors in (("8B", 3 + 2 * 11), ("30B-A3B", 3 + 2 * (9 + 3 * 4))):
        pushed = rows["push"][name]
        assert (pushed["tensors"], pushed["equal_to_the_loader"]) == (tensors, True)
        assert pushed["gb_s"] > 0 and pushed["us_a_tensor"] > 0
    for recompute in ("no recomputation", "full recomputation"):
        speed = rows["mfu_fsdp"][recompute]
        assert (speed["layers"], speed["mfu"], speed["waits_a_micro_batch"]) == (3, None, None)
        assert speed["tflops"] > 0


class Imitated(CUDA):
    """A CUDA device whose tensors are a CPU's."""

    def here(self) -> torch.device:
        return torch.device("cpu")

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def imitation_body(world: Any, target: Path, names: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, imitated(patch) as cuda:
        accelerator = Imitated(cuda)
        peaks = count(2**30, 2**28)
        patch.setattr(cuda, "max_memory_allocated", lambda: next(peaks))
        patch.setattr(device, "current", lambda: accelerator)
        for name in names:
            module: Any = importlib.import_module(f"benchmarks.gpu.{PARTS[name].module}")
            sizes = module.SMALL._replace(dtype="bfloat16")
            module.measure(world, Sheet(target / f"{name}.json", sizes._asdict()), sizes)


def test_what_a_cuda_device_knows_is_in_its_rows(tmp_path: Path) -> None:
    """Peaks, shares of the device's peak, and waits, of which an imitation on a CPU has none."""
    run_ranks(1, imitation_body, tmp_path, ["log_probs", "mfu"])
    rows = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        for name in ("log_probs", "mfu")
    }
    assert not any("error" in row for part in rows.values() for row in part.values()), rows
    assert all(sorted(part) == sorted(PARTS[name].rows) for name, part in rows.items())
    fused = rows["log_probs"]["fused"]
    assert fused["share_of_peak"] == pytest.approx(fused["tflops"] / 989.5)
    assert fused["peak_gib"] > 0
    both = rows["log_probs"]["fused against dense"]
    assert both["memory_ratio"] == pytest.approx(
        fused["peak_gib"] / rows["log_probs"]["dense"]["peak_gib"]
    )
    fit = rows["mfu"]["layers that fit"]
    assert fit["gib_a_layer"] > 0 and fit["layers"] == 3, (
        "of 50 GB there is room for more than the shape has"
    )
    for recompute in ("no recomputation", "full recomputation"):
        speed = rows["mfu"][recompute]
        assert speed["mfu"] == pytest.approx(speed["tflops"] / 989.5)
        assert (speed["waits_a_micro_batch"], speed["waits"]) == (0.0, "")
        assert speed["peak_gib"] > 1


@pytest.mark.ranks
def test_the_part_of_transformer_engine_runs_over_its_stub(tmp_path: Path) -> None:
    rows = found_by(tmp_path, ["mfu_te", "mfu_moe", "mfu_lora"], preloaded=TRANSFORMER_ENGINE)
    parameters = [rows[part]["no recomputation"]["billion_parameters"] for part in rows]
    assert len(set(parameters)) == 3, "three models: dense, with experts, with adapters"


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["engine", "completions", "loop", "features"])
def test_parts_with_vllm_run_on_a_cpu(name: str, tmp_path: Path) -> None:
    rows = found_by(tmp_path, [name])
    if name == "completions":
        assert [row["equal"] for row in rows[name].values()] == [4, 4]


def chat_model(folder: Path) -> None:
    """A random model with a chat template, and sums to ask it."""
    save_tiny(folder / "model", "qwen3", pad_token_id=0)
    tokenizer().save_pretrained(folder / "model")
    asked = {"messages": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}
    (folder / "data").mkdir()
    for part in ("train", "eval"):
        (folder / f"data/{part}.jsonl").write_text(f"{json.dumps(asked)}\n" * 4)


@pytest.mark.ranks
def test_a_published_models_part_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL is in an environment of its own (`requirements/trl.txt`), and not in this one."""
    chat_model(tmp_path / "smollm")
    monkeypatch.setenv("RFTMEGA_SMOLLM", str(tmp_path / "smollm"))
    run_ranks(1, parts_body, tmp_path, ["pretrained"])
    rows = json.loads((tmp_path / "pretrained.json").read_text())["rows"]
    assert all(rows[name]["steps"] == 2 for name in ("Megatron", "FSDP2", "LoRA")), rows


def test_another_program_is_no_rank_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL would look for the other ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "KEPT"):
        monkeypatch.setenv(name, "0")
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK"}.isdisjoint(environment())
    assert environment()["KEPT"] == "0"


@pytest.mark.ranks
def test_rows_are_written_one_by_one_and_one_that_fails_takes_none_with_it(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "new/part.json", {"tokens": 5})

    def full() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    def broken() -> dict[str, float]:
        raise ValueError("odd")

    def before_it_ends() -> dict[str, float]:
        return {"rows": float(len(json.loads(sheet.file.read_text())["rows"]))}

    assert sheet.row("good", lambda: {"a": 1.0}) == {"a": 1.0}
    assert sheet.row("full", full) is None
    assert sheet.failed == []
    assert sheet.row("broken", broken) is None
    sheet.skip("other", "vllm: ModuleNotFoundError: no")
    assert sheet.row("last", before_it_ends) == {"rows": 4.0}
    told = json.loads(sheet.file.read_text())
    assert told["settings"] == {"tokens": 5}
    rows = {
        name: {key: x for key, x in row.items() if key != "took_seconds"}
        for name, row in told["rows"].items()
    }
    assert rows == {
        "good": {"a": 1.0},
        "full": {"out_of_memory": "CUDA out of memory. Tried to allocate 9 GiB."},
        "broken": {"error": "ValueError: odd"},
        "other": {"skipped": "vllm: ModuleNotFoundError: no"},
        "last": {"rows": 4.0},
    }
    assert sheet.failed == ["broken"]


def test_a_part_whose_package_is_missing_or_broken_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_library.py").write_text("raise OSError('libcuda.so.1: cannot open\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    reasons = {
        "no_such_package": "ModuleNotFoundError: No module named",
        "broken_library": "OSError: libcuda.so.1",
    }
    for name, reason in reasons.items():
        monkeypatch.setitem(program.PARTS, "mfu", Part("mfu", ("one", "two"), needs=(name,)))
        assert program.measure("mfu", tmp_path, small=True) == 0
        rows = json.loads((tmp_path / "mfu.json").read_text())["rows"]
        assert list(rows) == ["one", "two"]
        assert all(
            row["skipped"].startswith(f"{name}: {reason}") and "more" not in row["skipped"]
            for row in rows.values()
        )


def test_a_part_may_go_without_a_package_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "installed_package", raising=False)
    # so that the end of the test takes it away again
    monkeypatch.setitem(sys.modules, "installed_package", None)
    monkeypatch.delitem(sys.modules, "installed_package")
    assert missing(Part("mfu", (), needs=(), without="installed_package")) == ""
    with pytest.raises(ImportError):
        importlib.import_module("installed_package")


def test_parts_run_by_themselves_and_one_without_time_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(command: list[str], *, check: bool, timeout: float) -> Any:
        asked.append((command[3:], timeout))
        if command[3] == "push":
            raise program.subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=1 if command[3] == "mfu" else 0)

    monkeypatch.setattr(program.subprocess, "run", run)
    assert (
        program.each_by_itself(["log_probs", "push", "mfu"], tmp_path, small=True, limit=9.0) == 1
    )
    assert asked == [
        ([name, "--target", str(tmp_path), "--small"], 9.0) for name in ("log_probs", "push", "mfu")
    ]
    said = capsys.readouterr().out
    assert "push: ended after 9 s" in said
    assert "failed: push, mfu" in said


def test_layers_are_as_many_as_fit_by_a_straight_line() -> None:
    from benchmarks.gpu.mfu import fitting

    gib = 2**30
    found = fitting((1, 3), (20 * gib, 30 * gib), 97 * gib, most=36)
    assert found == {"layers": 16, "gib_a_layer": 5.0, "gib_besides": 15.0}
    assert fitting((1, 3), (20 * gib, 30 * gib), 3 * gib, most=36)["layers"] == 1
    assert fitting((1, 3), (20 * gib, 30 * gib), 900 * gib, most=36)["layers"] == 36


def test_weights_of_holes_are_a_folder_that_the_family_reads(tmp_path: Path) -> None:
    """The names and shapes that transformers itself writes."""
    for variant, shape in (("qwen3", TINY), ("qwen3-moe", TINY_MOE)):
        changes = {"mlp_only_layers": []} if shape.experts else {}
        theirs = load_file(
            save_tiny(tmp_path / variant, variant, num_hidden_layers=2, **changes)
            / "model.safetensors"
        )
        folder = save_zeros(tmp_path / f"{variant}-zeros", shape, dtype="bfloat16")
        ours = load_file(folder / "model.safetensors")
        assert {name: x.shape for name, x in ours.items()} == {
            name: x.shape for name, x in theirs.items()
        }
        assert {x.dtype for x in ours.values()} == {torch.bfloat16}
    assert save_zeros(tmp_path / "large", TINY._replace(vocabulary=2**20), dtype="float32").exists()
    file = (tmp_path / "large/model.safetensors").stat()
    assert file.st_size > 2**29 and file.st_blocks * 512 < 2**20


def test_answers_are_equal_where_all_tokens_are() -> None:
    a, b = (
        Completion((5, 6), (-1.0, -2.0), "length", 0),
        Completion((5, 7), (-1.0, -2.0), "length", 0),
    )
    near = Completion((5, 6), (-1.0, -2.5), "length", 0)
    assert agreement([a, a], [near, b]) == {"answers": 2, "equal": 1, "logprob_gap_max": 0.5}


def test_a_runs_metrics_are_summed_up() -> None:
    seconds = {
        f"seconds_{phase}": value
        for value, phase in enumerate(("rollout", "score", "update", "push"))
    }
    steps = [
        {
            "step": n,
            "logprob_gap_max": n / 10,
            "logprob_gap_mean": n / 100,
            "reward": n / 4,
            "mfu_update": n / 5,
            "memory_mib_update": 1024.0 * n,
            **{name: value * n for name, value in seconds.items()},
        }
        for n in (1, 2)
    ]
    found = summary(
        [
            {"time": 130.0, "eval_exact_match": 0.2},
            *steps[:-1],
            steps[-1] | {"eval_exact_match": 0.4},
        ],
        begin=100.0,
    )
    wanted = {
        "steps": 2, "seconds_to_the_first_step": 30.0, "first_step_seconds": 6, "step_seconds": 12, "rollout_seconds": 0,
        "score_seconds": 2, "update_seconds": 4, "push_seconds": 6, "engine_idle_share": 1.0, "mfu_update": 0.4,
        "peak_gib_update": 2.0, "logprob_gap_max": 0.2, "logprob_gap_mean": 0.02, "accuracy_before": 0.2,
        "accuracy_after": 0.4, "rewards": "0.250 0.500",
    }  # fmt: skip
    assert {name: value for name, value in found.items() if value is not None} == wanted


def test_the_results_have_rows_of_each_part_and_no_others() -> None:
    records = json.loads((ROOT / "docs/results/gpu_speed.json").read_text())
    listed = {record["row"] for record in records if "row" in record}
    rows = {name: {f"gpu/{name}: {row}" for row in part.rows} for name, part in PARTS.items()}
    assert all(rows[name] & listed for name in PARTS)
    assert listed <= set().union(*rows.values())
