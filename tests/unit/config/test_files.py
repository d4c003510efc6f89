"""Config files that can't be read: a message that names file and line, never a traceback."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rftmega.config import RunConfig, load
from rftmega.errors import ConfigError
from rftmega.validation import violations

START = "model: {path: x}\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            START.encode() + 'trainer: {output: "caf\xe9"}'.encode("latin-1"),
            "run.yaml:2 is not UTF-8",
        ),
        (bytes(range(128, 256)), "run.yaml:1 is not UTF-8"),
        (b"a: \0", "run.yaml is not YAML"),
        (
            START.encode() + b"rollout:\n  engine: vllm\n  engine: scripted\n",
            "run.yaml:4 is not YAML: 'engine' is there twice",
        ),
        (START.encode() + b"model: {path: y}\n", "run.yaml:2 is not YAML: 'model' is there twice"),
        (
            START.encode() + b"reward: {recipe: {a: {math: 1, math: 2}}}\n",
            "run.yaml:2 is not YAML: 'math' is there twice",
        ),
        (
            START.encode() + b"rollout: 5\n",
            "rollout is a section, not an option. Give options of it, as rollout.engine",
        ),
        (b"a: &a {b: *a}", "Does an anchor"),
        (b"[" * 100_000, "nested too deep"),
        (
            START.encode() + b"trainer: {steps: 2024-13-45}",
            "run.yaml is not YAML: month must be in 1..12",
        ),
        (b"- a\n- b\n", "run.yaml holds a list; it must be sections of options"),
        (b"a: [1", "run.yaml:1 is not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    content: bytes, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert told in str(raised.value)


def test_a_folder_and_a_file_that_is_not_there_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder. Give the YAML file in it"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="There is no config file"):
        load(tmp_path / "run.yaml")


def test_a_byte_order_mark_is_read_and_a_section_without_options_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + START.encode()
        + b"rollout:\n# engine: vllm\ntrainer:\n  steps: 7\ncritic: {parallel: }\n"
    )
    found = load(path)
    assert (found.model.path, found.trainer.steps) == ("x", 7)
    assert found.rollout == RunConfig().rollout


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.steps=1e1", "trainer.steps=10.0 must be a whole number."),
        ("trainer.steps=abc", "trainer.steps='abc' must be a whole number."),
        ("trainer.export=maybe", "trainer.export='maybe' must be true or false."),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate='fast' must be a number."),
        ("data.evals=5", "data.evals=5 must be names and text, as {a: b}."),
        (
            "reward.recipe=x",
            "reward.recipe='x' must be names of names and numbers, as {a: {b: 1}}.",
        ),
        (
            "trainer.eval_pass_at={a: 1}",
            "trainer.eval_pass_at={'a': 1} must be a list of whole numbers, as [1,2].",
        ),
        ("data.sources={a: 1, a: 2}", "'a' is there twice"),
        ("rollout=5", "rollout is a section, not an option."),
    ],
)
def test_a_value_of_another_kind_is_refused_in_words_of_ours(
    override: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(START)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "run.yaml", [override])
    assert told in str(raised.value)
    assert "OmegaConf" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["trainer.seed", "trainer.steps", "rollout.max_batch", "checkpoint.keep_mib"]
)
def test_numbers_that_no_library_holds_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(START)
    found = violations(load(tmp_path / "run.yaml", [f"{name}=99999999999999999999"]), 1)
    assert f"{name}=99999999999999999999 must be below 2^31." in found
    assert any(
        "trainer.seed=-1 must be at least 0" in each
        for each in violations(load(tmp_path / "run.yaml", ["trainer.seed=-1"]), 1)
    )


@pytest.mark.parametrize("project", ["a/b", "a#b", "what?", "50%", "a:b", "a\\\\b", "x" * 129])
def test_names_that_wandb_refuses_are_refused_before(project: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(START)
    found = violations(load(tmp_path / "run.yaml", [f"logging.wandb={project}"]), 1)
    assert any("is no name of a project" in each for each in found)
    fine = violations(load(tmp_path / "run.yaml", ["logging.wandb=my-project_2"]), 1)
    assert not any("is no name of a project" in each for each in fine)


texts = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(
                st.one_of(
                    st.sampled_from(["model", "trainer", "path", "steps", "base", "data", "evals"]),
                    st.text(max_size=4),
                ),
                inner,
            ),
        ),
        max_leaves=12,
    ).map(lambda tree: yaml.safe_dump(tree).encode()),
    st.text("{}[]&*:-,!|>'\"%@ab1\n \t#?", max_size=60).map(str.encode),
)


@settings(max_examples=200, deadline=None)
@given(content=texts)
def test_no_file_is_answered_with_a_traceback(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        violations(load(path, ["model.path=x"]), 1)
