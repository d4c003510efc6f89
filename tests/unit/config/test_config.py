import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftmega.config import RunConfig, load, parse_override, shares
from rftmega.config.load import recipe
from rftmega.config.tree import choices_of, options, unions, value_of, walk
from rftmega.config.validation import violations
from rftmega.core.errors import ConfigError
from rftmega.run.option_reference import option_reference

ROOT = Path(__file__).parents[3]


def test_overrides_win_over_the_file_and_the_file_over_defaults(config_file: Path) -> None:
    config_file.write_text(config_file.read_text() + "trainer: {steps: 7, seed: 3}\n")
    config = load(config_file, ["trainer.steps=9", "optimizer.learning_rate=1e-6"])
    assert (config.trainer.steps, config.trainer.seed, config.trainer.prompts_per_step) == (
        9,
        3,
        16,
    )
    assert config.optimizer.learning_rate == 1e-6


def test_a_file_goes_over_its_base_which_may_have_one_and_is_found_from_its_folder(
    config_file: Path,
) -> None:
    config_file.write_text(
        config_file.read_text() + "trainer: {steps: 7, seed: 3}\nalgorithm: {recipe: dapo}\n"
    )
    folder = config_file.parent / "more"
    folder.mkdir()
    (folder / "a.yaml").write_text("base: ../run.yaml\ntrainer: {seed: 4, output: a}\n")
    (folder / "b.yaml").write_text(
        "base: a.yaml\ntrainer: {output: b}\nalgorithm: {policy_loss: {high: 0.3}}\n"
    )
    config = load(folder / "b.yaml", ["trainer.prompts_per_step=5"])
    trainer, algorithm = config.trainer, config.algorithm
    assert (trainer.steps, trainer.seed, trainer.output, trainer.prompts_per_step) == (7, 4, "b", 5)
    assert (algorithm.policy_loss.high, algorithm.dynamic_sampling.max_rounds) == (
        0.3,
        5,
    )  # what is given, and the recipe of the base's base


@pytest.mark.parametrize(
    ("base", "complaint"),
    [
        ("b.yaml", "is its own base"),
        ("a.yaml", "is its own base"),
        ("[a.yaml]", "must be the path"),
        ("c.yaml", "no config file"),
    ],
)
def test_a_base_that_is_none_is_refused(base: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"base: {base}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("rollout.temprature=1", "Did you mean rollout.temperature?"),
        ("paralel.tensor=2", "Did you mean parallel.tensor?"),
        ("tensor=2", "Did you mean parallel.tensor or rollout.tensor or critic.parallel.tensor?"),
        ("zzzz.qqqq=2", "--help"),
    ],
)
def test_a_typo_names_the_nearest_option(given: str, hint: str, config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file, [given])
    assert "is not an option" in str(caught.value)
    assert hint in str(caught.value)


def test_every_problem_of_a_file_is_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("trainer: {stepz: 1, seed: abc}\nmodle: {path: x}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    for part in ("trainer.stepz", "trainer.seed='abc'", "modle.path", "model.path must be given"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a: [", "is not YAML"), ("- 1", "holds a list"), (None, "There is no config file")],
)
def test_a_file_that_is_no_config_is_refused(
    text: str | None, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load(path)


def test_a_config_file_that_is_missing_names_its_neighbour(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean .*run\.yaml\?"):
        load(config_file.with_name("rum.yaml"))


def test_an_override_without_an_equals_sign_is_refused() -> None:
    with pytest.raises(ConfigError, match="option=value"):
        parse_override("parallel.tensor")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_as_numbers_however_python_prints_them(number: float) -> None:
    assert parse_override(f"a.b={number!r}") == ("a.b", number)


@pytest.mark.parametrize("pattern", ["[0-9]+", "*a", "@x", r"-?\d+: x", "1e5", ""])
def test_text_options_are_taken_as_they_are(pattern: str, config_file: Path) -> None:
    assert load(config_file, [f"reward.format_pattern={pattern}"]).reward.format_pattern == pattern


def test_what_yaml_cannot_read_is_a_wrong_value_and_no_traceback(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.steps='\[1'"):
        load(config_file, ["trainer.steps=[1"])


def test_sources_are_named_in_the_file_or_behind_it(config_file: Path) -> None:
    config_file.write_text(
        config_file.read_text().partition("data:")[0]
        + "data: {sources: {/tmp/a.b.jsonl: 0.7, /tmp#x: 3}}\n"
    )
    assert load(config_file).data.sources == {"/tmp/a.b.jsonl": 0.7, "/tmp#x": 3.0}
    assert load(config_file, ["data.sources={/: 1}"]).data.sources == {"/": 1.0}


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ([0.7, 0.3], [7, 3]),
        ([1.0], [1]),
        ([20, 10, 50], [2, 1, 5]),
        ([0.1, 0.2, 1e-3], [100, 200, 1]),
    ],
)
def test_shares_are_the_weights_as_they_are_written(
    weights: list[float], wanted: list[int]
) -> None:
    assert shares(weights) == wanted


RECIPES = sorted(path.stem for path in (ROOT / "rftmega/config/recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_options_that_fit_together_and_what_is_given_comes_first(name: str) -> None:
    config = load(ROOT / "examples/arithmetic/grpo.yaml", [f"algorithm.recipe={name}"])
    assert not [reason for reason in violations(config, 4) if "algorithm." in reason]
    (said,) = recipe(name)
    given = {"algorithm.kl.coef", "algorithm.updates_per_epoch"}  # by the example
    assert all(
        value_of(
            config, f"{option}.type" if option in unions() and isinstance(value, str) else option
        )
        == value
        for option, value in said.items()
        if option not in given
    )
    given = load(
        ROOT / "examples/arithmetic/grpo.yaml",
        [f"algorithm.recipe={name}", "algorithm.loss_aggregation=sequence_sum"],
    )
    assert given.algorithm.loss_aggregation == "sequence_sum"


def test_a_recipe_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=f"algorithm.recipe=gprs is unknown. Choose one of: {', '.join(RECIPES)}"
    ):
        load(ROOT / "examples/arithmetic/grpo.yaml", ["algorithm.recipe=gprs"])


def test_every_option_is_explained_and_its_default_shown() -> None:
    reference = option_reference()
    for name in options():
        if name.startswith(("critic.parallel.", "critic.optimizer.")):  # said once, as a whole
            name = f"{name.rpartition('.')[0]}.*"
        assert f"  {name} = " in reference or f"  {name}\n" in reference, name
    for option in walk():
        if choices_of(option.hint):
            value = getattr(option.owner(), option.name.rpartition(".")[2])
            assert value in choices_of(option.hint), option.name
    assert len(fields(RunConfig)) > 5


def test_reading_and_checking_a_config_imports_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'megatron', 'vllm')"
    heavy = (
        f"import sys, rftmega.config.validation; sys.exit(any(m in sys.modules for m in {heavy}))"
    )
    assert subprocess.run([sys.executable, "-c", heavy], check=False, cwd=ROOT).returncode == 0


def test_the_examples_are_sound_configs() -> None:
    for path in (ROOT / "examples").rglob("*.yaml"):
        load(path)


def test_an_address_of_another_type_is_not_shown(config_file: Path) -> None:
    config_file.write_text(
        config_file.read_text() + "reward: {remote_url: ['http://me:s3cr3t@host']}\n"
    )
    with pytest.raises(ConfigError, match=r"reward\.remote_url must be text") as raised:
        load(config_file)
    assert "s3cr3t" not in str(raised.value)
