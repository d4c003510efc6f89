"""Records in the structure of published data sets, read as a user's YAML says, and their rewards.

The records were written for these tests. Each is in the file format that the data set has on the Hub.
"""

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.core.types import Prompt
from rftmega.data.media.image_processor import processor_of
from rftmega.data.preference import load_preferences
from rftmega.data.prompts import load_prompts
from rftmega.data.tokenizer import Tokenizer
from rftmega.rewards import Reasoning, check_prompts, create
from tests.chat_formats import PLAIN, tokenizer
from tests.rollouts import answered
from tests.tiny_vision import IMAGE, VISION_END, VISION_START, save_tiny_vision


class DataSet(NamedTuple):
    """A record of a data set, the options with which it is read, the user's message that it becomes,
    and responses that are right and wrong.
    """

    options: str
    record: dict[str, Any]
    asked: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


# a timing decides nothing: the machine may be busy
MATH = "reward: {math: 1, math_seconds: 60, workers: 1}"
CODE = "reward: {code: 1, code_seconds: 60, workers: 1}"
BOTH = "reward: {recipe: {math: {math: 1}, code: {code: 1}}, math_seconds: 60, code_seconds: 60, workers: 1}"
THINK = {"content": "Think first.", "role": "system"}
SUMS = {"inputs": ["2 3\n", "-1 1\n"], "outputs": ["5\n", "0\n"]}
TOTAL = "class Solution:\n    def total(self, nums: List[int], more: int) -> int:\n        return "
DATA_SETS = {
    "GSM8K": DataSet(
        "data: {prompt_key: question, label_key: answer, chat_template: true}\n" + MATH,
        {
            "question": "A box holds 1,200 screws. Bo takes half of them, and 3 more. How many are left?",
            "answer": "Half of them are 1200/2 = <<1200/2=600>>600 screws.\nThen 600-3 = <<600-3=597>>597 are left.\n#### 597",
        },
        "A box holds 1,200 screws. Bo takes half of them, and 3 more. How many are left?",
        ("So 597 screws are left.", r"\boxed{597}", "1200/2 - 3 = 597\n#### 597"),
        ("600", "The answer is 1200.", r"597 at first, but \boxed{3}"),
    ),
    "GSM8K, thousands": DataSet(
        "data: {prompt_key: question, label_key: answer, chat_template: true}\n" + MATH,
        {
            "question": "A van costs $2,000 and a boat $500 more. And both?",
            "answer": "2000+2500=<<2000+2500=4500>>4500\n#### 4,500",
        },
        "A van costs $2,000 and a boat $500 more. And both?",
        ("They cost $4,500.", "4500", r"\boxed{4{,}500}"),
        ("4,50", "2500"),
    ),
    "MATH": DataSet(
        "data: {prompt_key: problem, label_key: solution, kind_key: type, chat_template: true}\n" + MATH,
        {
            "problem": r"Find the positive root of $4x^2 = 3$.",
            "level": "Level 2",
            "type": "Algebra",
            "solution": r"We have $x^2 = \frac{3}{4}$ so $x = \pm\frac{\sqrt{3}}{2}$. Positive: $\boxed{\frac{\sqrt{3}}{2}}.$",
        },
        r"Find the positive root of $4x^2 = 3$.",
        (r"It is $\boxed{\frac{\sqrt 3}2}$.", r"$x=\sqrt{3}/2$", r"\boxed{\sqrt{\frac34}}"),
        (r"\boxed{\frac{3}{4}}", r"\boxed{-\frac{\sqrt{3}}{2}}"),
    ),
    "MATH-500": DataSet(
        "data: {prompt_key: problem, label_key: answer, chat_template: true}\n" + MATH,
        {"problem": "Give the point.", "solution": r"It is $(3, \frac{\pi}{2})$.", "answer": r"\left( 3, \frac{\pi}{2} \right)",
         "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/1.json"},
        "Give the point.",
        (r"\boxed{(3, \pi/2)}",),
        (r"\boxed{(\pi/2, 3)}", r"\boxed{3}"),
    ),
    "DAPO-Math-17k": DataSet(
        "data: {label_key: reward_model.ground_truth, kind_key: ability}\n" + MATH,
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve step by step. Put it behind Answer:\n\nHow many primes are below 20?", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "8", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "1d-2"},
        },
        "Solve step by step. Put it behind Answer:\n\nHow many primes are below 20?",
        ("2, 3, 5, 7, 11, 13, 17, 19.\nAnswer: 8", "Answer: $8$"),
        ("Answer: 7", "8 or more\n\nAnswer: 19"),
    ),
    "Eurus-2-RL-Data, math": DataSet(
        "data: {label_key: reward_model.ground_truth, kind_key: ability}\n" + BOTH,
        {
            "data_source": "numina_olympiads",
            "prompt": [THINK, {"content": "Find $f(2)$ for $f(x)=x^{-2}$.", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": r"\frac{1}{4}", "style": "rule"},
            "extra_info": {"index": 7, "split": "train"},
        },
        "Find $f(2)$ for $f(x)=x^{-2}$.",
        (r"\boxed{\frac14}", "0.25"),
        (r"\boxed{4}",),
    ),
    "Eurus-2-RL-Data, code": DataSet(
        "data: {label_key: reward_model.ground_truth, kind_key: ability}\n" + BOTH,
        {
            "data_source": "taco",
            "prompt": [THINK, {"content": "Add two numbers.", "role": "user"}],
            "ability": "code",
            "reward_model": {"ground_truth": json.dumps(SUMS), "style": "rule"},
            "extra_info": {"index": 8, "split": "train"},
        },
        "Add two numbers.",
        ("```python\na, b = map(int, input().split())\nprint(a + b)\n```",),
        ("```python\nprint(5)\n```", "5"),
    ),
    "OpenR1-Math-220k": DataSet(
        "data: {prompt_key: problem, label_key: answer, kind_key: problem_type, chat_template: true}\n" + MATH,
        {
            "problem": "Two pipes fill a pool in 3 and 6 hours. Together?",
            "solution": "In $x$ hours ... $x=2$.",
            "answer": "2",
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "source": "olympiads",
            "uuid": "0a",
            "is_reasoning_complete": [True, False],
            "generations": ["<think>3 and 6</think> 2", "<think>Hm"],
            "correctness_math_verify": [True, False],
            "correctness_llama": None,
            "finish_reasons": None,
            "correctness_count": 1,
            "messages": [{"content": "Two pipes?", "role": "user"}, {"content": "<think></think>2", "role": "assistant"}],
        },
        "Two pipes fill a pool in 3 and 6 hours. Together?",
        (r"<think>3? No.</think>\boxed{2}", r"$2\ \text{hours}$"),
        (r"\boxed{3}", "<think>It is 2."),
    ),
    "LiveCodeBench, standard input": DataSet(
        "data: {prompt_key: question_content, label_key: public_test_cases, chat_template: true}\n" + CODE,
        {
            "question_title": "Double",
            "question_content": "Print twice the number.",
            "platform": "atcoder",
            "question_id": "abc000_a",
            "contest_date": "2024-01-01T00:00:00",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": json.dumps([{"input": "4\n", "output": "8\n", "testtype": "stdin"}]),
            "private_test_cases": "eJxr",
            "metadata": "{}",
        },
        "Print twice the number.",
        ("```python\nprint(2 * int(input()))\n```",),
        ("```python\nprint(int(input()))\n```",),
    ),
    "LiveCodeBench, a method": DataSet(
        "data: {prompt_key: question_content, label_key: public_test_cases, chat_template: true}\n" + CODE,
        {
            "question_title": "Total",
            "question_content": "Complete the method total.",
            "platform": "leetcode",
            "question_id": "1",
            "contest_date": "2024-01-01T00:00:00",
            "starter_code": "class Solution:\n    def total(self, nums: List[int], more: int) -> int:\n        ",
            "difficulty": "easy",
            "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
            "private_test_cases": "eJxr",
            "metadata": json.dumps({"func_name": "total"}),
        },
        "Complete the method total.",
        (f"```python\n{TOTAL}sum(nums) + more\n```",),
        (f"```python\n{TOTAL}sum(nums)\n```",),
    ),
}  # fmt: skip
# of the binarised set, for reward models: a response is better than another
ULTRAFEEDBACK: dict[str, Any] = {
    "prompt": "Name a colour.",
    "prompt_id": "0f",
    "chosen": [
        {"content": "Name a colour.", "role": "user"},
        {"content": "Red.", "role": "assistant"},
    ],
    "rejected": [
        {"content": "Name a colour.", "role": "user"},
        {"content": "Seven.", "role": "assistant"},
    ],
    "messages": [
        {"content": "Name a colour.", "role": "user"},
        {"content": "Red.", "role": "assistant"},
    ],
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("model"), PLAIN["chatml"])


def written(folder: Path, record: dict[str, Any]) -> Path:
    parquet.write_table(pa.Table.from_pylist([record]), folder / "train.parquet")
    return folder / "train.parquet"


def config_of(options: str, source: Path) -> RunConfig:
    read = yaml.safe_load(options)
    read["data"]["train"] = str(source)
    return configuration.load({"model": {"path": "none"}, **read}, [])


def loaded(ours: Tokenizer, folder: Path, name: str) -> tuple[RunConfig, Prompt]:
    config = config_of(DATA_SETS[name].options, written(folder, DATA_SETS[name].record))
    (prompt,) = load_prompts(
        config.data.train, ours, config.data, columns=True, max_prompt_tokens=999
    )
    return config, prompt


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_record_becomes_the_prompt_that_its_keys_name(
    name: str, ours: Tokenizer, tmp_path: Path
) -> None:
    _, prompt = loaded(ours, tmp_path, name)
    text = ours.inner.decode(prompt.token_ids)
    asked = f"<|im_start|>user\n{DATA_SETS[name].asked}<|im_end|>\n"
    assert text.endswith(f"{asked}<|im_start|>assistant\n")


@pytest.mark.parametrize("reward", [MATH, CODE, BOTH], ids=["math", "code", "both"])
def test_the_reward_of_a_record_knows_right_from_wrong(
    reward: str, ours: Tokenizer, tmp_path: Path
) -> None:
    """The sets with the same reward together: processes that compare take seconds to start."""
    names = [name for name, each in DATA_SETS.items() if each.options.endswith(reward)]
    configs, prompts = zip(*(loaded(ours, tmp_path, name) for name in names), strict=True)
    check_prompts(configs[0].reward, prompts)
    asked, said, wanted = [], [], []
    for name, prompt in zip(names, prompts, strict=True):
        for value, texts in ((1.0, DATA_SETS[name].right), (0.0, DATA_SETS[name].wrong)):
            for text in texts:
                asked.append(prompt)
                said.append(answered(ours.encode_reply(text), (), "stop", 0))
                wanted.append((name, text, value))
    made = create(configs[0].reward, ours.decode, Reasoning.of([], ours))
    found = [each["reward"] for each in made(asked, said)]
    assert [(*known[:2], value) for known, value in zip(wanted, found, strict=True)] == wanted


def test_preferences_of_ultrafeedback_are_pairs(ours: Tokenizer, tmp_path: Path) -> None:
    options = "data: {}\nalgorithm: {task: reward_model}"
    config = config_of(options, written(tmp_path, ULTRAFEEDBACK))
    lengths = {"max_prompt_tokens": 99, "max_response_tokens": 99}
    (pair,) = load_preferences(config.data.train, ours, config.data, **lengths)
    said = [ours.inner.decode(each.response_ids) for each in (pair.chosen, pair.rejected)]
    assert said == ["Red.<|im_end|>", "Seven.<|im_end|>"]
    assert "Name a colour." in ours.inner.decode(pair.chosen.prompt_ids)


def test_a_record_of_geometry3k_has_its_image_where_the_problem_names_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_vision(model, "qwen2_5_vl")
    picture = io.BytesIO()
    Image.new("RGB", (100, 50), (9, 200, 30)).save(picture, format="png")
    record = {
        "images": [{"bytes": picture.getvalue(), "path": None}],
        "problem": "<image>x",
        "answer": "3",
    }
    options = "data: {prompt_key: problem, label_key: answer}\n" + MATH
    config = config_of(options, written(tmp_path, record))
    (prompt,) = load_prompts(
        config.data.train,
        Tokenizer(model),
        config.data,
        columns=True,
        max_prompt_tokens=40,
        processor=processor_of(model),
        max_images=1,
    )
    (image,) = prompt.images
    assert prompt.label == "3"
    assert prompt.token_ids[0] == VISION_START
    assert image.start == 1
    assert prompt.token_ids[1 + image.tokens] == VISION_END
    assert set(prompt.token_ids[1 : 1 + image.tokens]) == {IMAGE}
    assert len(prompt.token_ids) == image.tokens + 3
    check_prompts(config.reward, [prompt])


def test_the_name_of_a_function_is_taken_from_the_record_only_where_its_tests_need_one(
    ours: Tokenizer, tmp_path: Path
) -> None:
    """LiveCodeBench names the function once for all tests of a record."""
    test = {"input": "4", "output": "8", "testtype": "functional"}
    data = "data: {prompt_key: q, label_key: tests}"
    for tests, metadata, name in (
        ([test], '{"func_name": "f"}', "f"),
        ([test], {"func_name": "f"}, "f"),
        ([{**test, "fn_name": "g"}], {"func_name": "f"}, "g"),
        ([{**test, "testtype": "stdin"}], {"func_name": "f"}, None),
        ([test], "no JSON", None),
    ):
        for given in (tests, json.dumps(tests)):
            path = written(tmp_path, {"q": "?", "tests": given, "metadata": metadata})
            config = config_of(data, path)
            (prompt,) = load_prompts(path, ours, config.data, max_prompt_tokens=99)
            (read,) = json.loads(prompt.label)
            assert read.get("fn_name") == name
            assert read["input"] == "4"
