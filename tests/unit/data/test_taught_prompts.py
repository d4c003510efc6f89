"""What a record says of its teachers: whether they teach its prompt, and with which prompt."""

import json
from pathlib import Path

import pytest

from rftmega.config import DataConfig
from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt, Taught
from rftmega.data.prompts import load_prompts
from rftmega.data.same_tokenizer import different_tokens
from tests.unit.data.test_prompts import Letters

RECORDS = [
    {"prompt": "12", "label": "3", "domain": "math", "hint": "1 2 3", "meta": {"score": 0.25}},
    {"prompt": "45", "label": "9", "domain": "code", "hint": "45 6", "meta": {"score": 1}},
]
TEACHERS = [
    Teacher(path="A", when={"domain": "math"}),
    Teacher(path="B", prompt="hint", gate="meta.score"),
    Teacher(path="C"),
]


def prompts(folder: Path, records: list[dict[str, object]]) -> list[Prompt]:
    file = folder / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return list(load_prompts(file, Letters(), DataConfig(), max_prompt_tokens=2, teachers=TEACHERS))


def test_records_say_who_teaches_them_and_with_which_prompt(
    tmp_path: Path,
) -> None:
    math, code = prompts(tmp_path, RECORDS)
    own = tuple(map(ord, "1 2 3")), tuple(map(ord, "45 6"))
    assert math.teachers == (Taught(), Taught(own[0], 0.25), Taught())
    assert code.teachers == (None, Taught(own[1], 1.0), Taught())
    for prompt in (math, code):
        assert Prompt.from_state(json.loads(json.dumps(prompt.state()))) == prompt


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ({"domain": "math", "hint": "1"}, "algorithm.teachers\\[\\].gate"),
        ({"hint": "1", "meta": {"score": 1}}, "algorithm.teachers\\[\\].when"),
        (
            {"domain": "code", "hint": "1", "meta": {"score": "high"}},
            "the mean score of the teacher",
        ),
        ({"domain": "code", "hint": "1", "meta": {"score": True}}, "the mean score of the teacher"),
        ({"domain": "code", "hint": "", "meta": {"score": 1}}, '"hint"'),
    ],
)
def test_a_record_that_does_not_say_it_is_refused_at_the_start(
    missing: dict[str, object],
    reason: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=reason):
        prompts(tmp_path, [{"prompt": "12", "label": "3"} | missing])


def test_tokenizers_are_compared_by_their_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Plain
    from tokenizers.models import WordLevel

    def saved(name: str, vocabulary: dict[str, int], *, pretty: bool = False) -> Path:
        (tmp_path / name).mkdir()
        made = Plain(WordLevel(vocabulary, unk_token="a"))
        made.save(str(tmp_path / name / "tokenizer.json"), pretty=pretty)
        return tmp_path / name

    policy = saved("policy", {"a": 0, "b": 1, "c": 2})
    assert different_tokens(policy, saved("same", {"c": 2, "b": 1, "a": 0}, pretty=True)) == ""
    assert "'b' is id 1 of the policy, and id 2 of it" in different_tokens(
        policy, saved("swapped", {"a": 0, "b": 2, "c": 1})
    )
    assert "'c' is id 2 of the policy, and no token of it" in different_tokens(
        policy, saved("less", {"a": 0, "b": 1})
    )
    more = different_tokens(policy, saved("more", {"a": 0, "b": 1, "c": 2, "d": 3}))
    assert "has 1 tokens that the policy's lacks, 'd'" in more
    (tmp_path / "none").mkdir()
    assert different_tokens(policy, tmp_path / "none") == ""
    (tmp_path / "none" / "tokenizer.json").write_text("{")
    assert "can't be read" in different_tokens(policy, tmp_path / "none")
