"""Which kernels are fused follows from what is installed, and a CPU runs as ever whatever that is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.config import ParallelConfig
from rftmega.model_providers import optional_cuda_packages as found_here
from rftmega.model_providers.description import ModelDescription, describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.optional_cuda_packages import Installed, fused_kernels, version_of
from tests.tiny_models import save_tiny

NOTHING = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
}
EXPERTS = {"moe_grouped_gemm": False, "moe_permute_fusion": False}
EVERYTHING = Installed(
    (2, 9, 0), permutation=True, weight_gradients=True, triton=True, deep_ep=True
)
ROPE, GRADIENTS, ACTIVATION = (
    {name: True} for name in list(NOTHING)[:1] + list(NOTHING)[2:3] + list(NOTHING)[1:2]
)
GROUPED, PERMUTED = ({name: True} for name in EXPERTS)
DEEP = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelDescription]:
    variants = ("qwen3", "llama-yarn", "qwen3-moe", "deepseek-v3")
    folders: dict[str, Path] = {
        variant: save_tiny(tmp_path_factory.mktemp(variant), variant) for variant in variants
    }
    return {variant: describe(read_hf_config(folder)) for variant, folder in folders.items()}


@pytest.mark.parametrize(
    ("found", "variant", "parallel", "dtype", "fused"),
    [
        (Installed(), "qwen3", {}, "bfloat16", {}),
        (Installed(triton=True), "qwen3", {}, "bfloat16", ACTIVATION),
        (
            Installed(triton=True, weight_gradients=True),
            "qwen3",
            {},
            "bfloat16",
            ACTIVATION | GRADIENTS,
        ),
        (Installed((2, 9, 0)), "qwen3", {}, "bfloat16", ROPE | GRADIENTS),
        (Installed((1, 12)), "qwen3", {}, "bfloat16", ROPE | GRADIENTS),
        # knows no context parallelism in its rotation
        (Installed((1, 11, 9)), "qwen3", {}, "bfloat16", GRADIENTS),
        # no experts here
        (EVERYTHING, "qwen3", {"expert": 2}, "bfloat16", ROPE | ACTIVATION | GRADIENTS),
        # its factor would be forgotten
        (EVERYTHING, "llama-yarn", {}, "bfloat16", ACTIVATION | GRADIENTS),
        (Installed(permutation=True), "qwen3-moe", {}, "bfloat16", {}),
        (Installed((2, 0)), "qwen3-moe", {}, "bfloat16", ROPE | GRADIENTS | GROUPED),
        (
            EVERYTHING,
            "qwen3-moe",
            {},
            "bfloat16",
            ROPE | ACTIVATION | GRADIENTS | GROUPED | PERMUTED,
        ),
        (
            EVERYTHING,
            "qwen3-moe",
            {"expert": 2},
            "float32",
            ROPE | ACTIVATION | GRADIENTS | GROUPED | PERMUTED,
        ),
        (
            EVERYTHING,
            "qwen3-moe",
            {"expert": 2},
            "bfloat16",
            ROPE | ACTIVATION | GRADIENTS | GROUPED | PERMUTED | DEEP,
        ),
        (
            EVERYTHING,
            "deepseek-v3",
            {"expert": 2},
            "bfloat16",
            ACTIVATION | GRADIENTS | GROUPED | PERMUTED | DEEP,
        ),
    ],
)
def test_what_is_installed_decides_what_is_fused(
    found: Installed,
    variant: str,
    parallel: dict[str, int],
    dtype: str,
    fused: dict[str, Any],
    models: dict[str, ModelDescription],
) -> None:
    wanted = NOTHING | (EXPERTS if models[variant].experts else {}) | fused
    assert (
        fused_kernels(found, models[variant], ParallelConfig(**parallel), getattr(torch, dtype))
        == wanted
    )


def test_on_a_cpu_nothing_counts_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        found_here, "_imported", lambda name: (SimpleNamespace(__version__="2.9.0+abc"), "")
    )
    assert found_here.installed.__wrapped__() == Installed()
    monkeypatch.setattr(found_here.device, "current", lambda: SimpleNamespace(type="cuda"))
    assert found_here.installed.__wrapped__() == EVERYTHING
    monkeypatch.setattr(
        found_here, "_imported", lambda name: (None, f"OSError: {name} is of another build")
    )
    broken = found_here.installed.__wrapped__()
    assert broken == Installed(why_not="OSError: transformer_engine.pytorch is of another build")
    assert (
        broken.told
        == "without Transformer Engine: OSError: transformer_engine.pytorch is of another build"
    )
    assert (EVERYTHING.told, Installed().told) == ("Transformer Engine 2.9.0", "")


@pytest.mark.parametrize("error", ["OSError", "RuntimeError", "AttributeError", "ValueError"])
def test_a_package_that_can_not_be_imported_says_why_whatever_it_raises(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"engine_that_raises_{error}"
    (tmp_path / f"{name}.py").write_text(f"raise {error}('undefined symbol: cublasLt')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert found_here._imported(name) == (None, f"{error}: undefined symbol: cublasLt")
    assert found_here._imported("no_such_engine") == (
        None,
        "ModuleNotFoundError: No module named 'no_such_engine'",
    )
    assert found_here._imported("json")[1] == ""


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.9.0", (2, 9, 0)), ("1.12.0+cf0d0c2", (1, 12, 0)), ("2.3.0.dev0+5fdd7bb", (2, 3, 0))],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert version_of(text) == numbers
