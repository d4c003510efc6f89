"""Records as published data sets have them are read as they are."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data.preference import Pair, load_preferences, pair_rows
from rftmega.data.prompts import load_prompts
from rftmega.data.records import value_at, with_value
from rftmega.data.supervised import load_supervised
from rftmega.data.tokenizer import Tokenizer
from tests.chat_formats import PLAIN, tokenizer

LIMITS = {"max_prompt_tokens": 999, "max_response_tokens": 999}
OPEN = "<|im_start|>assistant\n"
HI = {"role": "user", "content": "hi"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))


@pytest.fixture
def ours(tmp_path: Path) -> Tokenizer:
    return tokenizer(tmp_path / "model", PLAIN["chatml"])


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def written(path: Path, *records: Any) -> Path:
    (path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    return path / "a.jsonl"


def test_files_of_verl_are_read_by_dotted_keys(ours: Tokenizer, tmp_path: Path) -> None:
    """The layout of verl's examples/data_preprocess/gsm8k.py."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+{n}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {"split": "train", "index": n, "difficulty": {"level": n}},
        }
        for n in range(3)
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    config = DataConfig(
        label_key="reward_model.ground_truth",
        kind_key="data_source",
        columns={"level": "extra_info.difficulty.level", "where": "extra_info.split"},
    )
    found = load_prompts(path, ours, config, columns=True, max_prompt_tokens=99)
    assert [prompt.label for prompt in found] == ["0", "2", "4"]
    assert found[2].kind == "openai/gsm8k"
    assert ours.inner.decode(found[2].token_ids) == user("2+2?") + OPEN
    record = json.loads(found[2].record)
    assert (record["level"], record["where"], record["ability"]) == (2, "train", "math")
    assert record["reward_model"] == {"style": "rule", "ground_truth": "4"}


def test_columns_that_only_people_read_are_cut_and_may_hold_anything(
    ours: Tokenizer, tmp_path: Path
) -> None:
    row = {"prompt": "2+2?", "label": "4", "blob": b"ab", "tests": ["1"] * 999, "level": 2}
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([row]), path)
    (found,) = load_prompts(path, ours, DataConfig(), shown=True, max_prompt_tokens=99)
    record = json.loads(found.record)
    assert (record["prompt"], record["level"], record["blob"]) == ("2+2?", 2, "b'ab'")
    assert record["tests"] == json.dumps(row["tests"])[:1000] + " [...]"


def test_every_key_may_be_dotted(ours: Tokenizer, tmp_path: Path) -> None:
    deep = {"x": {"q": "a", "y": "b", "n": "c", "kind": "d", "a.b": "e"}}
    path = written(tmp_path, deep)
    keys = {"prompt_key": "x.q", "label_key": "x.y", "kind_key": "x.kind"}
    (prompt,) = load_prompts(path, ours, DataConfig(**keys), max_prompt_tokens=99)
    assert (ours.inner.decode(prompt.token_ids), prompt.label, prompt.kind) == ("a", "b", "d")
    config = DataConfig(prompt_key="x.q", response_key="x.a.b")
    (example,) = load_supervised(path, ours, config, **LIMITS)
    assert ours.inner.decode(example.response_ids) == "e<|im_end|>"
    config = DataConfig(prompt_key="x.q", chosen_key="x.y", rejected_key="x.n")
    (pair,) = load_preferences(path, ours, config, **LIMITS)
    assert ours.inner.decode(pair.rejected.response_ids) == "c<|im_end|>"


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "a.b", 1),
        ({"a": {"b.c": 3}}, "a.b.c", 3),
        ({"a.b": {"c": 4}}, "a.b.c", 4),
        ({"a": {"b": None}}, "a.b", None),
        ({"a": 5}, "a.b", "none"),
        ({"a": {"c": 6}}, "a.b", "none"),
        ({}, "a", "none"),
        ({"": {"": 7}}, ".", 7),
    ],
)
def test_a_dotted_key_is_one_key_or_a_path(record: Any, key: str, value: Any) -> None:
    assert value_at(record, key, "none") == value


def test_another_value_replaces_that_of_a_dotted_key() -> None:
    record = {"a": {"b": 1, "c": 2}, "d": 3}
    assert with_value(record, "a.b", 9) == {"a": {"b": 9, "c": 2}, "d": 3}
    assert with_value(record, "d.e", 9) == {**record, "d.e": 9}
    assert record["a"] == {"b": 1, "c": 2}


def test_a_missing_dotted_key_is_told_with_the_keys_that_there_are(
    ours: Tokenizer, tmp_path: Path
) -> None:
    path = written(tmp_path, {"prompt": "a", "reward_model": {"style": "rule"}})
    config = DataConfig(label_key="reward_model.ground_truth")
    with pytest.raises(DataError, match=r'a\.jsonl:1: no "reward_model\.ground_truth" among'):
        load_prompts(path, ours, config, max_prompt_tokens=99)


def test_a_chat_under_another_key_is_told(ours: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, {"conversations": [{"from": "human", "value": "hi"}], "label": "1"})
    with pytest.raises(DataError, match=r"Set data\.prompt_key=conversations"):
        load_prompts(path, ours, DataConfig(), max_prompt_tokens=99)


@pytest.mark.parametrize(
    "text",
    [json.dumps([HI]), f"  {json.dumps([HI])}\n", json.dumps([{"from": "human", "value": "hi"}])],
)
def test_messages_as_json_text_are_messages(text: str, ours: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": text, "label": "1", "response": "yes"})
    (found,) = load_prompts(path, ours, DataConfig(), columns=True, max_prompt_tokens=99)
    assert ours.inner.decode(found.token_ids) == user("hi") + OPEN
    assert json.loads(found.record)["prompt"] == [HI]
    (example,) = load_supervised(path, ours, DataConfig(), **LIMITS)
    assert ours.inner.decode(example.prompt_ids) == user("hi") + OPEN


@pytest.mark.parametrize("text", ["[1, 2] + [3]?", "[]", '["a"]', '[{"x": 1}]', "[{", "[1, 2]"])
def test_other_text_that_begins_with_a_bracket_stays_text(
    text: str, ours: Tokenizer, tmp_path: Path
) -> None:
    path = written(tmp_path, {"prompt": text, "label": "1"})
    (found,) = load_prompts(path, ours, DataConfig(), max_prompt_tokens=99)
    assert ours.inner.decode(found.token_ids) == text


def test_a_malformed_chat_as_json_text_is_refused(ours: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": '[{"role": "user"}]', "label": "1"})
    with pytest.raises(DataError, match=r'a\.jsonl:1: message 0 of "prompt" has no content'):
        load_prompts(path, ours, DataConfig(), max_prompt_tokens=99)


def test_the_input_of_alpacas_records_stands_behind_the_instruction(
    ours: Tokenizer, tmp_path: Path
) -> None:
    records = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Say 3.", "input": "", "output": "3"},
        {"instruction": "Say 3.", "output": "3"},
    ]
    path = written(tmp_path, *records)
    keys = {"prompt_key": "instruction", "response_key": "output", "label_key": "output"}
    config = DataConfig(**keys)
    asked = ["Add.\n\n1 and 2", "Say 3.", "Say 3."]
    found = load_supervised(path, ours, config, **LIMITS)
    assert [ours.inner.decode(each.prompt_ids) for each in found] == asked
    prompts = load_prompts(path, ours, config, columns=True, max_prompt_tokens=99)
    assert [ours.inner.decode(each.token_ids) for each in prompts] == asked
    assert json.loads(prompts[0].record)["prompt"] == asked[0]


def test_a_column_input_belongs_to_no_other_prompt_unless_it_is_named(
    ours: Tokenizer, tmp_path: Path
) -> None:
    path = written(tmp_path, {"prompt": "a", "input": "b", "label": "1"})
    for settings, text in (({}, "a"), ({"alpaca_input_key": "input"}, "a\n\nb")):
        (found,) = load_prompts(path, ours, DataConfig(**settings), max_prompt_tokens=99)
        assert ours.inner.decode(found.token_ids) == text
    path = written(tmp_path, {"prompt": [HI], "input": "b", "label": "1"})
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*one of them is no text"):
        load_prompts(path, ours, DataConfig(alpaca_input_key="input"), max_prompt_tokens=99)


def shown(ours: Tokenizer, pair: Pair) -> list[tuple[str, str]]:
    return [
        (ours.inner.decode(each.prompt_ids), ours.inner.decode(each.response_ids))
        for each in (pair.chosen, pair.rejected)
    ]


ANSWERED = [(user("hi") + OPEN, "yes<|im_end|>"), (user("hi") + OPEN, "no<|im_end|>")]
HUMAN = {"from": "human", "value": "hi"}
FORMS = {
    "UltraFeedback, binarised": {
        "prompt": "hi",
        "prompt_id": "7",
        "chosen": [HI, YES],
        "rejected": [HI, NO],
        "messages": [HI, YES],
        "score_chosen": 8.0,
    },
    "UltraFeedback, of TRL": {"chosen": [HI, YES], "rejected": [HI, NO], "score_chosen": 8.0},
    "HH-RLHF": {
        "chosen": "\n\nHuman: hi\n\nAssistant: yes",
        "rejected": "\n\nHuman: hi\n\nAssistant: no",
    },
    "HH-RLHF, of TRL": {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
    "ShareGPT": {
        "conversations": [HUMAN],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "ShareGPT, whole": {
        "chosen": [HUMAN, {"from": "gpt", "value": "yes"}],
        "rejected": [HUMAN, {"from": "gpt", "value": "no"}],
    },
    "JSON text": {"chosen": json.dumps([HI, YES]), "rejected": json.dumps([HI, NO])},
}
SAFE_RLHF = {
    "prompt": [HI],
    "response_0": "no",
    "response_1": "yes",
    "is_response_0_safe": False,
    "is_response_1_safe": True,
    "better_response_id": 0,
    "safer_response_id": 1,
}


def test_the_number_of_the_better_or_of_the_safer_response_chooses_it(
    ours: Tokenizer, tmp_path: Path
) -> None:
    """The columns of PKU-SafeRLHF."""
    path = written(tmp_path, SAFE_RLHF, SAFE_RLHF | {"safer_response_id": 0})
    better, _ = load_preferences(path, ours, DataConfig(chosen_key="better_response_id"), **LIMITS)
    assert shown(ours, better) == ANSWERED[::-1]
    assert better.unsafe is None
    config = DataConfig(chosen_key="safer_response_id")
    pairs = load_preferences(path, ours, config, safety=True, **LIMITS)
    assert [shown(ours, pair) for pair in pairs] == [ANSWERED, ANSWERED[::-1]]
    rows = pair_rows(pairs)
    assert rows.unsafe is not None
    assert rows.unsafe.tolist() == [False, True, True, False]
    assert pair_rows([better]).unsafe is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"safer_response_id": 2}, '"safer_response_id" is 2, but must be 0 or 1'),
        ({"response_1": ...}, "so the record needs response_1 as well"),
        ({"is_response_0_safe": ...}, "so the record needs is_response_0_safe as well"),
        ({"is_response_0_safe": "no"}, "must be true or false"),
        ({"safer_response_id": "yes"}, "needs the number of the safer response (0 or 1)"),
        ({"safer_response_id": True}, "needs the number of the safer response (0 or 1)"),
        ({"response_0": None}, "response_0"),
    ],
)
def test_a_record_of_a_cost_model_that_lacks_something_is_refused(
    changed: dict[str, Any], said: str, ours: Tokenizer, tmp_path: Path
) -> None:
    record = {name: value for name, value in (SAFE_RLHF | changed).items() if value is not ...}
    path, config = written(tmp_path, record), DataConfig(chosen_key="safer_response_id")
    with pytest.raises(DataError, match=r"a\.jsonl:1: ") as caught:
        load_preferences(path, ours, config, safety=True, **LIMITS)
    assert said in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_published_preferences_are_read_as_they_are(
    form: str, ours: Tokenizer, tmp_path: Path
) -> None:
    record = FORMS[form]
    key = "conversations" if "conversations" in record else "prompt"
    path = written(tmp_path, record)
    (pair,) = load_preferences(path, ours, DataConfig(prompt_key=key), **LIMITS)
    assert shown(ours, pair) == ANSWERED


def test_a_table_of_conversations_gives_the_same_pairs(ours: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([FORMS["UltraFeedback, binarised"]]), path)
    (pair,) = load_preferences(path, ours, DataConfig(), **LIMITS)
    assert shown(ours, pair) == ANSWERED


def test_several_turns_of_hh_rlhf_are_turns(ours: Tokenizer, tmp_path: Path) -> None:
    begin = "\n\nHuman: hi\n\nAssistant: What\n\nis it?\n\nHuman: Human: or not?"
    record = {f"{key}": f"{begin}\n\nAssistant: {key}" for key in ("chosen", "rejected")}
    (pair,) = load_preferences(written(tmp_path, record), ours, DataConfig(), **LIMITS)
    before = f"{user('hi')}{OPEN}What\n\nis it?<|im_end|>\n{user('Human: or not?')}{OPEN}"
    assert shown(ours, pair) == [(before, "chosen<|im_end|>"), (before, "rejected<|im_end|>")]


def test_conversations_that_differ_before_the_answer_are_scored_whole(
    ours: Tokenizer, tmp_path: Path
) -> None:
    other = {"role": "user", "content": "ho"}
    path = written(tmp_path, {"chosen": [HI, YES], "rejected": [other, NO]})
    (pair,) = load_preferences(path, ours, DataConfig(), **LIMITS)
    assert shown(ours, pair) == [ANSWERED[0], (user("ho") + OPEN, "no<|im_end|>")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"prompt": "ho", "chosen": [HI, YES], "rejected": [HI, NO]},
            '"chosen" is a whole conversation, which does not begin with "prompt"',
        ),
        ({"chosen": [HI, YES, HI], "rejected": [HI, NO]}, "which the assistant ends"),
        ({"chosen": [YES], "rejected": [NO]}, "must be a conversation of a user and the assistant"),
        ({"chosen": "yes", "rejected": "no"}, 'no "prompt" among'),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"},
            'message 1 of "rejected" has empty content',
        ),
        ({"prompt": [HI, YES], "chosen": [NO], "rejected": [HI]}, "one message of the assistant"),
    ],
)
def test_preferences_that_do_not_fit_are_refused_by_record(
    record: Any, said: str, ours: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: ") as caught:
        load_preferences(written(tmp_path, record), ours, DataConfig(), **LIMITS)
    assert said in str(caught.value)
