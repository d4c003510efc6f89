"""The comparison of log-probs with a reference names the cause of a difference."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rftmega.run.model_check import reference
from rftmega.run.model_check.backends import (
    Compared,
    _export,
    expected,
    of_itself,
    of_log_probs,
    row_of,
    rows_for,
    scale_between,
)
from tests.tiny_models import save_tiny

LENGTHS = (9, 2, 14)


@pytest.fixture
def drawn() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Logits [T, V] and tokens [T] of rows, and their log-probs in a loop in float64."""
    torch.manual_seed(3)
    logits = [3 * torch.randn(length, 50) for length in LENGTHS]
    rows = [torch.randint(50, (length,)) for length in LENGTHS]
    return logits, rows, [log_probs(*each) for each in zip(logits, rows, strict=True)]


def log_probs(logits: Tensor, row: Tensor, factor: float = 1.0) -> Tensor:
    found = []
    for place in range(len(row) - 1):
        values = [factor * float(each) for each in logits[place]]
        total = math.log(sum(map(math.exp, values)))
        found.append(values[int(row[place + 1])] - total)
    return torch.tensor(found)


Drawn = tuple[list[Tensor], list[Tensor], list[Tensor]]


def test_equal_log_probs_are_ok(drawn: Drawn) -> None:
    logits, rows, own = drawn
    assert torch.cat([expected(*each) for each in zip(logits, rows, strict=True)]).tolist() == (
        pytest.approx(torch.cat(own).tolist(), abs=1e-5)
    )
    assert of_log_probs(own, logits, rows, {}).state == "ok"


@pytest.mark.parametrize("factor", [0.06, 0.5, 1.7, 16.0])
def test_a_factor_of_the_logits_is_found(factor: float, drawn: Drawn) -> None:
    logits, rows, _ = drawn
    own = [log_probs(*each, factor) for each in zip(logits, rows, strict=True)]
    assert scale_between(own, logits, rows) == pytest.approx(factor, rel=1e-2)
    found = of_log_probs(own, logits, rows, {})
    assert (found.state, "times transformers'" in found.said) == ("problem", True)


def test_a_difference_from_the_first_token_on_is_told_from_one_of_later_tokens(
    drawn: Drawn,
) -> None:
    logits, rows, own = drawn
    noise = [0.3 * torch.rand(len(each)) + 0.1 for each in own]
    everywhere = [each + more for each, more in zip(own, noise, strict=True)]
    later = [
        each + more * (torch.arange(len(each)) > 3) for each, more in zip(own, noise, strict=True)
    ]
    assert "from the first token on" in of_log_probs(everywhere, logits, rows, {}).said
    assert "first 4 token(s) of a row agree" in of_log_probs(later, logits, rows, {}).said
    broken = [each * float("nan") for each in own]
    assert of_log_probs(broken, logits, rows, {}).state == "problem"


def test_rows_have_no_special_tokens_and_are_longer_than_a_short_window() -> None:
    config = {"image_token_id": 3, "eos_token_id": [4], "pad_token_id": 0, "sliding_window": 128}
    rows = rows_for(config, 8, 1000)
    assert int(rows.lengths.max()) == 144
    tokens = {int(each) for row in range(len(rows)) for each in row_of(rows, row)}
    assert tokens == {1, 2, 4, 5, 6, 7}
    assert int(rows_for(config, 8, 20).lengths.max()) == 20
    assert int(rows_for({"sliding_window": 4096}, 8, 10_000).lengths.max()) == 40


@pytest.mark.parametrize(
    ("logits", "fields", "said"),
    [
        (torch.full((2, 5), float("nan")), {}, "NaN or infinite logits"),
        (torch.full((2, 5), 2.0), {}, "All tokens are equally likely"),
        (torch.arange(10.0).view(2, 5), {"final_logit_softcapping": 3.0}, "they are not capped"),
    ],
)
def test_logits_that_no_model_should_have_are_problems(
    logits: Tensor, fields: dict[str, Any], said: str
) -> None:
    (problem,) = reference.of_logits([logits], fields)
    assert (problem.state, said in problem.said) == ("problem", True)
    (fine,) = reference.of_logits([torch.arange(10.0).view(2, 5)], {"final_logit_softcapping": 9.5})
    assert fine.state == "ok"


def test_an_export_that_lacks_changes_or_adds_a_tensor_is_told(tmp_path: Path) -> None:
    before, after = save_tiny(tmp_path / "before", "llama"), tmp_path / "after"
    after.mkdir()
    (after / "config.json").write_bytes((before / "config.json").read_bytes())
    held = load_file(before / "model.safetensors")
    rows = rows_for(json.loads((before / "config.json").read_text()), 131, 256)
    given = Compared(rows, None)
    save_file(held, after / "model.safetensors")
    assert _export(before, after, given).state == "ok"
    up, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    for changed, said in (
        ({up: held[up] + 1e-3}, f"1 tensor(s) differ, '{up}' first"),
        ({"extra": torch.rand(2)}, "1 tensor(s) are new, 'extra' first"),
        ({norm: None}, f"1 tensor(s) are missing, '{norm}' first"),
    ):
        tensors = {name: each for name, each in (held | changed).items() if each is not None}
        save_file(tensors, after / "model.safetensors")
        found = _export(before, after, given)
        assert (found.state, said in found.said) == ("problem", True), found


def test_transformers_own_passes_that_differ_with_the_length_are_no_fault_of_a_backend(
    drawn: Drawn,
) -> None:
    logits, rows, own = drawn

    def model(*, input_ids: Tensor, use_cache: bool) -> Any:
        known = next(
            each for each, row in zip(logits, rows, strict=True) if row[0] == input_ids[0, 0]
        )
        length = input_ids.shape[1]
        return SimpleNamespace(logits=known[None, :length] * (1 + spread * (length < 9)))

    for spread, even in ((0.0, True), (0.5, False)):
        difference = reference.uneven(model, rows, logits)
        wanted = max(
            float(
                (each[:n].log_softmax(-1) - (each[:n] * (1 + spread)).log_softmax(-1)).abs().max()
            )
            for each, n in zip(logits, (6, 1, 7), strict=True)
        )
        assert difference == pytest.approx(wanted, abs=1e-6)
        off = [each + 0.5 for each in own]
        found = of_itself(of_log_probs(off, logits, rows, {}), difference)
        assert found.state == ("problem" if even else "note")
        assert ("Not comparable" in found.said) != even
    assert reference.of_uneven(0.3).state == "problem"


@pytest.mark.parametrize("fails", [True, False])
def test_a_model_whose_cache_fails_generates_without_one(fails: bool) -> None:  # noqa: FBT001
    def generate(given: Tensor, *, use_cache: bool, **rest: Any) -> Tensor:
        if use_cache and fails:
            raise RuntimeError("size 64 must match\nsize 48")
        return torch.cat([given, torch.tensor([[7, 2]])], 1)

    tokenizer: Any = SimpleNamespace(
        inner=SimpleNamespace(chat_template=""),
        encode=lambda text, chat_template: [3, 4],
        decode=str,
        stop_ids=[2],
    )
    model = SimpleNamespace(generate=generate)
    found = reference.of_generation(model, tokenizer, 8, positions=64)
    assert (found.state, "stops after 2 tokens: '[7, 2]'" in found.said) == ("ok", True)
    assert ("size 64 must match size 48" in found.said) == fails
