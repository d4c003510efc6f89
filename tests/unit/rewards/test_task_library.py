"""A task library scores the answers to its tasks, whatever a completion contains."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftmega import config as configuration
from rftmega.config import RewardConfig, RunConfig
from rftmega.config.task_libraries import worker_command
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.records import records
from rftmega.rewards import check_prompts
from rftmega.rewards.answer import answer_of
from rftmega.rewards.part import Answer, Undecided
from rftmega.rewards.task_library import TaskLibraryPart
from tests import fake_task_library

LIBRARY = "reasoning_gym://sums?size=5"
RECORD = json.dumps({"task_source": LIBRARY, "task_index": 3})  # 3+1
LIMIT = 1.0  # seconds of a score


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskLibraryPart]:
    folder = fake_task_library.write(tmp_path_factory.mktemp("library"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setattr("rftmega.rewards.task_library.SECONDS", LIMIT)
        part = TaskLibraryPart(answer_of(r"<answer>(.*?)</answer>"), workers=1)
        yield part
        part.pool.close()


def score(part: TaskLibraryPart, answer: str, record: str = RECORD) -> float | None:
    (found,) = part([Answer(f"so <answer>{answer}</answer>", "4", record=record)])
    return found


def test_the_library_scores_what_the_pattern_finds_in_its_order(part: TaskLibraryPart) -> None:
    texts = ["<answer>4</answer>", "<answer>5</answer>", "4", "<answer>2*2</answer>"]
    assert part([Answer(text, "4", record=RECORD) for text in texts]) == [1.0, 0.0, 0.0, 1.0]


def test_a_task_of_no_library_has_no_score(part: TaskLibraryPart) -> None:
    of_a_file = [Answer("4", "4"), Answer("4", "4", record='{"prompt": "3+1"}')]
    assert part(of_a_file) == [None, None]


@pytest.mark.parametrize("answer", ["", "(((", "1/0", "\x00", "\ud800", "raise_", "'9'*10**12"])
def test_an_answer_for_which_the_scorer_raises_scores_0(part: TaskLibraryPart, answer: str) -> None:
    found = score(part, answer)
    assert found == 0.0 and not isinstance(found, Undecided)


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "__import__('os')._exit(0)",
        "__import__('os').kill(__import__('os').getpid(), 9)",
    ],
)
def test_an_answer_that_hangs_or_ends_the_scorer_is_undecided_and_the_next_one_is_scored(
    part: TaskLibraryPart, answer: str
) -> None:
    assert isinstance(score(part, answer), Undecided)
    assert score(part, "4") == 1.0


def test_code_in_an_answer_reaches_no_file(part: TaskLibraryPart, tmp_path: Path) -> None:
    assert score(part, f"open('{tmp_path}/written', 'w').write('x')") == 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_the_library_does_not_know_is_undecided(part: TaskLibraryPart) -> None:
    strange = json.dumps({"task_source": "reasoning_gym://gone", "task_index": 3})
    assert isinstance(score(part, "4", strange), Undecided)


def test_the_process_that_scores_runs_in_this_python() -> None:
    assert worker_command("score")[0] == sys.executable


def loaded(data: dict[str, object], **reward: object) -> RunConfig:
    return configuration.load({"model": {"path": "model"}, "data": data, "reward": reward})


def test_the_library_is_the_reward_if_none_is_named_and_all_data_are_its_tasks() -> None:
    config = loaded({"train": LIBRARY, "eval": f"{LIBRARY}&seed=1"})
    assert config.reward.used() == {"task_library"}
    assert config.trainer.eval_accuracy == "task_library"
    assert config.reads_columns
    mixed = loaded({"sources": {LIBRARY: 2.0, "reasoning_gym://products": 1.0}})
    assert mixed.reward.used() == {"task_library"}


@pytest.mark.parametrize("reward", [{"exact_match": 1.0}, {"math": 1.0}, {"functions": ["a.py:f"]}])
def test_a_reward_that_is_named_is_kept(reward: dict[str, object]) -> None:
    assert "task_library" not in loaded({"train": LIBRARY}, **reward).reward.used()


def test_beside_a_file_each_record_is_scored_by_its_own_rule() -> None:
    config = loaded({"sources": {LIBRARY: 1.0, "a.jsonl": 1.0}})
    assert config.reward.recipe == {
        "": {"exact_match": 1.0},
        "reasoning_gym": {"task_library": 1.0},
    }


def test_a_record_of_a_file_that_only_a_library_would_score_is_refused_before_the_run() -> None:
    prompts = [Prompt((1,), "4", record=RECORD), Prompt((1,), "4", index=1)]
    with pytest.raises(DataError, match=r"prompt 1\).*reward.recipe=\{reasoning_gym:"):
        check_prompts(RewardConfig(exact_match=0.0, task_library=1.0), prompts)


@pytest.mark.ranks
def test_reasoning_gym_itself_creates_the_same_tasks_and_scores_its_own_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks of word_ladder depend on the order of a set, and polynomials are read by SymPy."""
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("pip install --no-deps -r requirements/reasoning_gym.txt")
    part = TaskLibraryPart(answer_of(""), workers=1)
    for name in ("chain_sum", "word_ladder", "polynomial_multiplication"):
        found = []
        for seed in ("1", "2"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            found.append([record for _, record in records(f"reasoning_gym://{name}?size=4")])
        assert found[0] == found[1]
        tasks = [json.dumps(record) for record in found[0]]
        own = [Answer(json.loads(task)["answer"], "", record=task) for task in tasks]
        assert part(own) == [1.0] * len(own)
        assert part([Answer("no", "", record=task) for task in tasks]) != [1.0] * len(own)
    part.pool.close()
