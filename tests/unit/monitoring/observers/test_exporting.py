"""A model that an earlier run has trained is not replaced by another run's."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rftmega.config import load
from rftmega.config.validation import violations
from rftmega.models.hf import export_folder
from rftmega.monitoring.observers.assemble import observers_of
from rftmega.monitoring.observers.evaluate_rows import HeldOut
from rftmega.monitoring.observers.exporting import Exporting


def wrote(folder: Path) -> str:
    return (folder / "model").read_text()


def run(output: Path, model: str, *, resumed: bool = False, **changed: bool) -> None:
    """Begins and ends a run that exports `model`, with an average and adapters."""
    (output.parent / "run.yaml").write_text("model: {path: nowhere, lora: {rank: 4}}\n")
    config = load(
        output.parent / "run.yaml",
        [f"trainer.output={output}", "algorithm.ema_beta=0.5", "trainer.trajectories=0"],
    )

    def export(folder: str) -> None:
        for target in map(Path, (folder, f"{folder}_ema", f"{folder}_adapter")):
            draft = export_folder.begin(target)
            (draft / "model").write_text(model)
            export_folder.settle(draft, target)

    evaluation = HeldOut({}, lambda rows: {}, every=0, last=1)
    text = SimpleNamespace(chat=None, decode=str, pieces=list)
    made = observers_of(config, evaluation, text, export, is_main=False, **changed)
    (exporting,) = [each for each in made if isinstance(each, Exporting)]
    exporting.is_main = True
    trainer = SimpleNamespace(resumed=resumed, stopped=False, step=1)
    exporting.on_start(trainer, {})
    exporting.on_end(trainer)


def test_a_run_in_a_used_folder_keeps_the_models_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    output = tmp_path / "out"
    for model in ("first", "second", "third"):
        run(output, model)
    for name in ("policy", "policy_ema", "policy_adapter"):
        found = [wrote(output / each) for each in (f"{name}.1", f"{name}.2", name)]
        assert found == ["first", "second", "third"]
    assert f"{output / 'policy'} is an earlier run's: it is policy.1 now." in caplog.text


def test_a_run_that_goes_on_replaces_its_own_model(tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(output, "after 4 steps")
    run(output, "after 8 steps", resumed=True)
    assert wrote(output / "policy") == "after 8 steps"
    assert not (output / "policy.1").exists()


@pytest.mark.parametrize(
    "option", ["model.path", "critic.path", "reward.model_path", "model.lora.path"]
)
def test_a_model_that_the_run_reads_is_not_where_it_writes_one(option: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: elsewhere, lora: {rank: 4}}\n")
    name = "policy_adapter" if option == "model.lora.path" else "policy"
    given = [f"trainer.output={tmp_path}/a/..", f"{option}={tmp_path}/{name}"]

    def complaints(*more: str) -> list[str]:
        found = violations(load(tmp_path / "run.yaml", [*given, *more]), 1, data=False)
        return [each for each in found if "writes its own model" in each]

    assert len(complaints()) == 1 and complaints()[0].startswith(f"{option}={tmp_path}/{name}")
    assert complaints("trainer.export=false") == []
