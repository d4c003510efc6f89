"""Nothing that is learnt depends on the layout, the micro-batch size or the order of rows; see tests/invariance.py."""

from pathlib import Path

import pytest

from tests.invariance import ALONE, LAYOUTS, SETTINGS, Layout, Setting, differences, runs_of
from tests.tiny_models import save_tiny

CASES = [(variant, name) for variant, layouts in LAYOUTS.items() for name in layouts]
TOLERANCE = 1e-5
# bf16 keeps 8 bits: what one process in bf16 differs from fp32 by, with some room.
NOISE = {"loss": 5e-2, "logp": 2e-2, "entropy": 2e-2, "grad_norm": 5e-2, "weights": 2e-2}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def alone(model: tuple[str, Path]) -> dict:
    """One process, by setting."""
    return {setting: found[0] for setting, found in zip(SETTINGS, runs_of(model[1], ALONE, SETTINGS), strict=True)}


def assert_equal(found: list[dict], wanted: dict, case: str) -> None:
    for quantity, difference in differences(found, wanted).items():
        assert difference < TOLERANCE, (case, quantity, difference)


def test_in_one_process_the_micro_batch_size_and_the_order_of_rows_do_not_matter(alone: dict) -> None:
    for setting, found in alone.items():
        reference = Setting(setting.weighting)
        assert_equal([found], alone[reference], str(setting))
    token_mean, sequence_mean = (alone[Setting(weighting)] for weighting in ("token_mean", "sequence_mean"))
    assert differences([token_mean], sequence_mean)["loss"] > 1e-2, "the weighting changed nothing, so it was not compared"
    moved = token_mean["logp"][1] - token_mean["logp"][0]
    assert moved.abs().max() > 0.1, "nothing was learnt, so nothing was compared"


def test_three_updates_are_those_of_one_process_under_every_layout(model: tuple[str, Path], alone: dict) -> None:
    variant, folder = model
    for name, layout in LAYOUTS[variant].items():
        (found,) = runs_of(folder, layout, [Setting()])
        assert_equal(found, alone[Setting()], name)


@pytest.mark.ranks
def test_so_they_are_for_every_weighting_micro_batch_size_and_order(model: tuple[str, Path], alone: dict) -> None:
    variant, folder = model
    for name, layout in LAYOUTS[variant].items():
        for setting, found in zip(SETTINGS, runs_of(folder, layout, SETTINGS), strict=True):
            assert_equal(found, alone[Setting(setting.weighting)], f"{name}, {setting}")


@pytest.mark.ranks
def test_in_bf16_they_differ_from_fp32_by_the_noise_of_bf16(model: tuple[str, Path], alone: dict) -> None:
    variant, folder = model
    layouts: dict[str, Layout] = {"one process": ALONE, **LAYOUTS[variant]}
    for name, layout in layouts.items():
        (found,) = runs_of(folder, layout, [Setting(dtype="bfloat16")])
        for quantity, difference in differences(found, alone[Setting()]).items():
            assert difference < NOISE[quantity], (name, quantity, difference)
