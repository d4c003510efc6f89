"""Preference data that a policy is trained on: pairs, single responses, and KTO's mismatched ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import AlgorithmConfig, DataConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.config.options.preference import DPO, KTO, PreferenceLoss
from rftmega.core.errors import DataError
from rftmega.data.preference import Preference, preference_rows
from rftmega.data.splits import given_of
from rftmega.data.supervised import Example
from tests.unit.data.test_splits import Letters


def config_of(
    folder: Path, records: Sequence[dict[str, Any]], loss: PreferenceLoss, **keys: str
) -> RunConfig:
    file = folder / "preferences.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return RunConfig(
        algorithm=AlgorithmConfig(task="preference", preference=loss),
        data=DataConfig(train=str(file), eval=str(file), **keys),
        rollout=RolloutConfig(max_prompt_tokens=4, max_response_tokens=6),
        trainer=TrainerConfig(prompts_per_step=2, seed=3),
    )


def loaded(config: RunConfig) -> list[Preference]:
    _, held_out = given_of(config, Letters())
    return list(held_out[""])


def text(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids)).rstrip("\0")


def told(example: Example) -> tuple[str, str]:
    return text(example.prompt_ids), text(example.response_ids)


PAIRS = [
    {"prompt": "a", "chosen": "1", "rejected": "22"},
    {"prompt": "a", "chosen": "3", "rejected": "4"},
    {"prompt": "b", "chosen": "5", "rejected": "66"},
]


def test_a_pair_is_a_desirable_response_followed_by_an_undesirable_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, PAIRS, DPO())
    examples = loaded(config)
    sums = {"1": -1.5, "22": -2.5, "3": -3.5, "4": -4.5, "5": -5.5, "66": -6.5}
    rows, mismatched = preference_rows(examples, lambda each: sums[told(each)[1]])
    assert mismatched is None and rows.desirable is not None and rows.reference_sum is not None
    assert rows.desirable.tolist() == [True, False] * 3
    assert rows.reference_sum.tolist() == [-1.5, -2.5, -3.5, -4.5, -5.5, -6.5]
    assert rows.mask.sum(-1).tolist() == [2, 3, 2, 2, 2, 3], "the response and its end"
    order, _ = given_of(config, Letters())
    assert [len(batch) for batch, _ in zip(order, range(3), strict=False)] == [2, 2, 2]
    assert preference_rows(examples).rows.reference_sum is None


def test_a_mismatched_response_is_that_of_the_next_record_with_another_prompt(
    tmp_path: Path,
) -> None:
    found = [each.mismatched for each in loaded(config_of(tmp_path, PAIRS, KTO()))]
    assert [[told(example) for example in own] for own in found] == [
        [("a", "5"), ("a", "66")],
        [("a", "5"), ("a", "66")],
        [("b", "1"), ("b", "22")],
    ]
    alike = [{**record, "prompt": "c"} for record in PAIRS]
    found = [each.mismatched for each in loaded(config_of(tmp_path, alike, KTO()))]
    assert [told(own[0]) for own in found] == [("c", "3"), ("c", "5"), ("c", "1")]


SINGLE = [
    {"prompt": "a", "answer": "1", "good": True},
    {"prompt": "b", "answer": "22", "good": False},
    {"prompt": "c", "answer": "3", "good": 1},
]
KEYS = {"desirable_key": "good", "response_key": "answer"}


def test_single_responses_have_a_label_each(tmp_path: Path) -> None:
    examples = loaded(config_of(tmp_path, SINGLE, KTO(), **KEYS))
    rows, mismatched = preference_rows(examples, lambda each: -float(len(each.response_ids)))
    assert rows.desirable is not None and rows.desirable.tolist() == [True, False, True]
    assert [told(each.mismatched[0]) for each in examples] == [("a", "22"), ("b", "3"), ("c", "1")]
    assert mismatched is not None and mismatched.reference_sum is not None
    assert mismatched.reference_sum.tolist() == [-3.0, -2.0, -2.0]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "a", "answer": "1"}, 'no "good" among the keys'),
        ({"prompt": "a", "answer": "1", "good": "yes"}, "\"good\" is 'yes', but must be true"),
        ({"prompt": "a", "good": True}, 'no "answer" among the keys'),
    ],
)
def test_a_single_response_without_a_label_is_refused(
    record: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=complaint):
        loaded(config_of(tmp_path, [record], KTO(), **KEYS))
