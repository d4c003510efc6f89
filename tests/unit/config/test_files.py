"""Config files that can't be read: a message that names file and line, never a traceback."""

import contextlib
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rftmega.config import RunConfig, load
from rftmega.config.tree import options
from rftmega.config.validation import violations
from rftmega.core.errors import ConfigError
from tests.unit.config.overridden import overridden

START = "model: {path: x}\n"
ROOT = Path(__file__).parents[3]
EXAMPLES = [path.read_bytes() for path in sorted((ROOT / "examples").rglob("*.yaml"))]
SIGNS = [
    *(
        b"{",
        b"}",
        b"[",
        b'"',
        b":\n",
        b"- ",
        b"null",
        b"~",
        b"1e999",
        b"\0",
        b"\xff",
        b"&a *a",
        b".",
    ),
    *(b"!!python/object:os.system", b"? ", b"\n", b"9" * 400, b".nan", b"${x}", b"???", b"&a [*a]"),
]


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
        (b"a: &a {b: *a}", "an anchor (&) holds itself (*)"),
        (b"[" * 100_000, "nested too deep"),
        (b'model: {path: "\\ud800"}', "a text contains '\\ud800', which is no character"),
        (b'plugins: ["a\\0b"]', "a text contains '\\x00', which is no character"),
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


def test_texts_that_are_not_characters_are_refused_in_dictionaries_and_overrides_too(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="The dictionary can't be a config: a text contains"):
        load({"model": {"path": "\ud800"}})
    path = tmp_path / "run.yaml"
    path.write_text(START)
    with pytest.raises(ConfigError, match="contains bytes that are no characters"):
        load(path, ["model.path=a\udcff"])


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


def test_numbers_that_no_library_holds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(START)
    names = ("trainer.seed", "trainer.steps", "rollout.max_batch", "checkpoint.keep_mib")
    large = [f"{name}=99999999999999999999" for name in names]
    found = violations(load(tmp_path / "run.yaml", large), 1)
    assert {f"{each} must be below 2^31." for each in large} <= {*found}
    assert any(
        "trainer.seed=-1 must be at least 0" in each
        for each in violations(load(tmp_path / "run.yaml", ["trainer.seed=-1"]), 1)
    )


def test_names_that_wandb_refuses_are_refused_before(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(START)
    config = load(tmp_path / "run.yaml", ["logging.wandb=my-project_2"])
    for project in ("a/b", "a#b", "what?", "50%", "a:b", "a\\\\b", "x" * 129):
        found = violations(overridden(config, f"logging.wandb={project}"), 1)
        assert any("is no name of a project" in each for each in found), project
    fine = violations(config, 1)
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


@settings(max_examples=40, deadline=None)
@given(content=texts)
def test_no_file_is_answered_with_a_traceback(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        violations(load(path, ["model.path=x"]), 1)


NUMBERS = ("-1", "1e999", ".nan", "9" * 400, "0x10", "1_000", "2024-13-45", "5e-324")
REFERENCES = ("${a}", "${trainer.steps}", "${oc.env:HOME}", "???", "${", "${oc.env:NO_SUCH_ONE}")
SHAPES = (
    *("", "null", "[]", "{}", "{a: b}", "[1,[2]]", "true", '"', "a: b", "\x00", "!!set {a}"),
    *("&a [*a]", "&a {b: *a}", "[null]", "{1: 2}", "{a: {b: {c: 1}}}", '"\\ud800"', "~", "- a"),
    *("[${a}]", "{a: ${b}}", "[" + "9" * 400 + "]", "!!binary aGk=", "2024-01-01"),
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(options())),
    st.sampled_from((*NUMBERS, *REFERENCES, *SHAPES)),
    st.booleans(),
)
def test_no_value_of_any_option_is_a_traceback(name: str, value: str, in_file: bool) -> None:
    """Whatever stands behind an option, in a file or as an override, is taken or refused."""
    with tempfile.TemporaryDirectory() as folder:
        path, overrides = Path(folder) / "run.yaml", [] if in_file else [f"{name}={value}"]
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(name.split("."))]
        text = "\n".join(lines) + f" {value}\n" if in_file else START
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(ConfigError):
            violations(load(path, overrides), 1, data=False)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_damaged_file_is_a_traceback(data: st.DataObject) -> None:
    """Examples with bytes that are changed, left out, doubled, or replaced by YAML's own signs."""
    content = bytearray(data.draw(st.sampled_from(EXAMPLES)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content)))
        more = data.draw(st.sampled_from(SIGNS) | st.binary(max_size=4))
        content[at : at + data.draw(st.integers(0, 9))] = more
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.yaml").write_bytes(bytes(content))
        with contextlib.suppress(ConfigError):
            load(Path(folder) / "run.yaml")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("parallel.tensor=${a}", "refers to what is not there (Interpolation key 'a' not found)"),
        (
            "parallel.tensor=${oc.env:HOME}",
            "parallel.tensor='${oc.env:HOME}' must be a whole number",
        ),
        ("parallel.tensor=???", "parallel.tensor=??? stands for a value that is to be given"),
        ("optimizer.learning_rate=" + "9" * 400, "a whole number of more than 300 digits"),
        ("trainer.steps=" + "9" * 400, "a whole number of more than 300 digits"),
        ("reward.functions=&a [*a]", "reward.functions='&a [*a]' must be a list of text"),
    ],
)
def test_what_has_no_value_is_refused_by_the_name_of_its_option(
    override: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(START)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "run.yaml", [override])
    assert told in str(raised.value)


def test_an_option_may_refer_to_another_and_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "/data")
    (tmp_path / "run.yaml").write_text(
        "trainer: {output: 'runs/${model.path}'}\nmodel: {path: tiny}\ndata: {train: '${oc.env:WHERE}/a'}\n"
    )
    config = load(tmp_path / "run.yaml")
    assert (config.trainer.output, config.data.train) == ("runs/tiny", "/data/a")


def test_anchors_that_hold_themselves_or_multiply_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(START + "data: {evals: &a {b: *a}}\n")
    with pytest.raises(ConfigError, match="holds itself"):
        load(path)
    doubled = "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 9))
    path.write_text(f"a0: &a0 [1]\n{doubled}")
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load(path)


def test_a_dictionary_is_a_config_and_what_is_wrong_with_it_is_one_error() -> None:
    tree = {"model": {"path": "x"}, "trainer": {"steps": 7}, "algorithm": {"recipe": "gspo"}}
    found = load(tree, ["trainer.seed=3"])
    assert (found.trainer.steps, found.trainer.seed, tree["trainer"]) == (7, 3, {"steps": 7})
    assert found.algorithm.policy_loss.type == "gspo"
    with pytest.raises(ConfigError) as raised:
        load({"trainer": {"stepz": 1, "seed": "abc"}})
    for told in ("This config:", "trainer.stepz", "trainer.seed='abc'", "model.path must be given"):
        assert told in str(raised.value)
