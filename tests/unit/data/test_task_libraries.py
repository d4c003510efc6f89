"""Tasks that a library creates by name: the same in every process, and errors before a run."""

from pathlib import Path

import pytest

from rftmega.config import DataConfig, RolloutConfig, RunConfig, TrainerConfig, task_libraries
from rftmega.config.secrets import without_credentials
from rftmega.config.validation.data import files
from rftmega.core.errors import DataError
from rftmega.data.records import records
from rftmega.data.splits import prompts_of
from rftmega.sandbox import reasoning_gym_worker as worker
from tests import fake_task_library
from tests.unit.data.test_splits import Letters, words


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_task_library.write(tmp_path)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def refusal_of(tasks: str) -> str:
    with pytest.raises(DataError) as raised:
        list(records(f"reasoning_gym://{tasks}"))
    return str(raised.value)


@pytest.mark.usefixtures("library")
def test_a_task_comes_once_with_the_answer_and_the_place_where_the_scorer_finds_it() -> None:
    """Of 12 tasks two are repeated: the fake library has ten questions."""
    source = "reasoning_gym://sums?low=2&size=12&seed=3"
    found = [record for _, record in records(source)]
    assert [each["prompt"] for each in found] == [f"{(3 + i) % 10}+2" for i in range(10)]
    assert [each["label"] for each in found] == [str((3 + i) % 10 + 2) for i in range(10)]
    assert [each["task_index"] for each in found] == list(range(10))
    assert {each["task_source"] for each in found} == {source}


@pytest.mark.usefixtures("library")
def test_the_same_records_come_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's metadata show the order of a set, on which tasks of the library depend as well."""
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(list(records("reasoning_gym://sums")))
    assert found[0] == found[1]
    assert len(found[0][0][1]["metadata"]["letters"]) == 6


@pytest.mark.usefixtures("library")
def test_an_unknown_data_set_is_refused_with_the_nearest_one() -> None:
    assert "reasoning_gym://sum?size=3: 'sum' is no data set" in refusal_of("sum?size=3")
    assert "Did you mean sums?" in refusal_of("sum?size=3")


@pytest.mark.usefixtures("library")
def test_every_wrong_parameter_is_named_with_what_the_data_set_accepts() -> None:
    said = refusal_of("sums?lo=2&size=many&seed=none")
    assert "lo is no parameter of sums. Did you mean low?" in said
    assert "size=many must be a whole number." in said
    assert "seed must be a number" in said
    assert "sums accepts: low (a whole number), names (a list, as a,b), seed (" in said


@pytest.mark.usefixtures("library")
def test_what_the_library_itself_refuses_is_told() -> None:
    assert "sums refuses the parameters: AssertionError: low must be positive" in refusal_of(
        "sums?low=0"
    )
    assert "sums has no curriculum, so it has no level" in refusal_of("sums?level=2")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("True", bool, True),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("a,b", list[str], ["a", "b"]),
        ("1,0.5", tuple, (1, 0.5)),
        ("1,2", tuple[int, ...], (1, 2)),
    ],
)
def test_a_parameter_is_read_by_the_type_of_the_data_sets_field(
    text: str, kind: object, value: object
) -> None:
    assert worker.value_of(text, kind) == value


@pytest.mark.parametrize(("text", "kind"), [("x", int), ("1", bool), ("a", dict[str, int])])
def test_a_text_that_is_no_value_of_the_type_is_refused(text: str, kind: object) -> None:
    with pytest.raises(ValueError):
        worker.value_of(text, kind)


@pytest.mark.usefixtures("library")
def test_no_held_out_task_is_among_the_training_tasks_even_if_the_seeds_overlap() -> None:
    """Seeds 0 and 3 share tasks 3 to 5, as the library's own seeds do."""
    data = DataConfig(
        train="reasoning_gym://sums?size=6", eval="reasoning_gym://sums?size=3&seed=3"
    )
    config = RunConfig(
        data=data,
        rollout=RolloutConfig(max_prompt_tokens=8),
        trainer=TrainerConfig(prompts_per_step=2),
    )
    order, held_out = prompts_of(config, Letters(), check=lambda prompts: None)
    stream = iter(order)
    trained = {word for _ in range(6) for word in words(next(stream))}
    assert words(held_out[""]) == ["3+1", "4+1", "5+1"]
    assert trained == {"0+1", "1+1", "2+1"}
    assert order.sizes == {"": 3}


@pytest.mark.usefixtures("library")
def test_a_run_whose_tasks_are_all_held_out_is_refused() -> None:
    same = "reasoning_gym://sums?size=3"
    config = RunConfig(
        data=DataConfig(train=same, eval=same), rollout=RolloutConfig(max_prompt_tokens=8)
    )
    with pytest.raises(DataError, match="each of its 3 tasks is held out"):
        prompts_of(config, Letters(), check=lambda prompts: None)


def test_a_missing_package_is_one_error_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_libraries.importlib.util, "find_spec", lambda name: None)
    config = RunConfig(
        data=DataConfig(train="reasoning_gym://sums", eval="reasoning_gym://sums?seed=1")
    )
    said = [problem for problem in files(config) if "reasoning" in problem]
    assert len(said) == 1
    assert "-m pip install --no-deps -r " in said[0]
    named = Path(said[0].rsplit(maxsplit=1)[1])
    assert named.is_file() and "reasoning-gym==" in named.read_text()


def test_the_parameters_of_tasks_are_stored_with_the_run_since_they_are_no_secrets() -> None:
    source = "reasoning_gym://sums?size=3&separator=@"
    assert without_credentials(f"data.train={source} https://me:pw@host/a?key=1") == (
        f"data.train={source} https://host/a?..."
    )


def test_an_unknown_library_is_refused_with_the_nearest_one() -> None:
    (said,) = (
        problem
        for problem in files(RunConfig(data=DataConfig(train="reasoning-gim://sums")))
        if "data.train" in problem
    )
    assert "is no library of tasks. Did you mean reasoning_gym?" in said
