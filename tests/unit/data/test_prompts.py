import json
from pathlib import Path

import pytest

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.prompts import load_prompts
from rftmega.data.sampler import PromptOrder


class Letters:
    """One token a character."""

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        return tuple(ord(c) for c in prompt)


def load(path: Path, text: str, **settings: object) -> list[Prompt]:
    path.write_text(text)
    return load_prompts(path, Letters(), DataConfig(train="", **settings), max_prompt_tokens=5)


def test_prompts_keep_their_label_and_place(tmp_path: Path) -> None:
    found = load(
        tmp_path / "a.jsonl", '{"prompt": "ab", "label": "x"}\n\n{"prompt": "c", "label": 7}\n'
    )
    assert found == [Prompt((97, 98), "x", 0), Prompt((99,), "7", 1)]


def test_a_prompt_may_have_a_kind_under_a_key_of_choice(tmp_path: Path) -> None:
    lines = '{"prompt": "a", "label": "x", "kind": "sum", "task": "word"}\n{"prompt": "a", "label": "x"}\n'
    assert [prompt.kind for prompt in load(tmp_path / "a.jsonl", lines)] == ["sum", ""]
    assert [prompt.kind for prompt in load(tmp_path / "a.jsonl", lines, kind_key="task")] == [
        "word",
        "",
    ]


@pytest.mark.parametrize(
    "label",
    [{"tests": "assert f()"}, {"inputs": ["1"], "outputs": ["2"]}, [{"input": "1", "output": "2"}]],
)
def test_tests_of_programs_may_be_objects(label: object, tmp_path: Path) -> None:
    (prompt,) = load(tmp_path / "a.jsonl", json.dumps({"prompt": "a", "label": label}))
    assert json.loads(prompt.label) == label


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a", "label": {"x": 1}}', "must be a string or a number, not dict"),
        ('{"prompt": "a", "label": [1]}', "must be a string or a number, not list"),
        ('{"prompt": "a", "label": []}', "must be a string or a number, not list"),
        ('{"prompt": "a", "label": "x"', "not JSON"),
        ("[1, 2]", "a JSON list, not an object"),
        ('{"prompt": "a"}', 'no "label" among the keys'),
        ('{"label": "a"}', 'no "prompt" among the keys'),
        ('{"prompt": "", "label": "x"}', "not empty"),
        ('{"prompt": "a", "label": null}', "must be a string or a number"),
        ('{"prompt": "a", "label": "x", "kind": 7}', '"kind" must be a string, not int'),
        (
            '{"prompt": "abcdef", "label": "x"}',
            "the prompt has 6 tokens, rollout.max_prompt_tokens is 5",
        ),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(
    line: str, complaint: str, tmp_path: Path
) -> None:
    good = '{"prompt": "a", "label": "x"}'
    with pytest.raises(DataError, match=r"a\.jsonl:2: ") as caught:
        load(tmp_path / "a.jsonl", f"{good}\n{line}\n{good}\n")
    assert complaint in str(caught.value)


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    assert load(tmp_path / "a.jsonl", '{"prompt": "a\u2028b", "label": "x"}\n')[0].token_ids == (
        97,
        0x2028,
        98,
    )


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff", "label": "x"}')
    with pytest.raises(DataError, match="not UTF-8"):
        load_prompts(tmp_path / "a.jsonl", Letters(), DataConfig(train=""), max_prompt_tokens=5)


def test_a_prompt_without_any_token_is_refused(tmp_path: Path) -> None:
    class Deaf(Letters):
        def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
            return ()

    (tmp_path / "a.jsonl").write_text('{"prompt": "abc", "label": "x"}')
    with pytest.raises(DataError, match="a.jsonl:1: the tokenizer makes no token of 'abc'"):
        load_prompts(tmp_path / "a.jsonl", Deaf(), DataConfig(train=""), max_prompt_tokens=5)


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    longer = [f'{{"prompt": "{"a" * (6 + more)}", "label": "x"}}\n' for more in range(12)]
    with pytest.raises(DataError) as caught:
        load(tmp_path / "a.jsonl", "".join(longer))
    assert "a.jsonl:1:" in str(caught.value)
    assert "a.jsonl:10:" in str(caught.value)
    assert "... and 2 more." in str(caught.value)


def test_a_mistake_of_every_record_is_one_line_with_their_number(tmp_path: Path) -> None:
    lines = '{"question": "a", "label": "x"}\n' * 500 + '{"prompt": "abcdef", "label": "x"}\n'
    with pytest.raises(DataError) as caught:
        load(tmp_path / "a.jsonl", lines)
    first, second = str(caught.value).splitlines()
    assert "a.jsonl:1: " in first
    assert first.endswith("(the same in 499 more places)")
    assert "a.jsonl:501: " in second


def test_long_prompts_are_dropped_on_request(tmp_path: Path) -> None:
    lines = '{"prompt": "abcdef", "label": "x"}\n{"prompt": "a", "label": "x"}\n'
    assert len(load(tmp_path / "a.jsonl", lines, too_long="drop")) == 1


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable prompt"):
        load(tmp_path / "a.jsonl", "\n")


def test_every_epoch_uses_every_prompt_once_in_another_order() -> None:
    prompts = [Prompt((i,), index=i) for i in range(7)]
    stream = iter(PromptOrder(prompts, batch_size=3, seed=5))
    drawn = [prompt.index for _ in range(7) for prompt in next(stream)]
    epochs = [drawn[:7], drawn[7:14], drawn[14:21]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_resumed_order_goes_on_where_it_was() -> None:
    prompts = [Prompt((i,), index=i) for i in range(7)]
    whole = iter(PromptOrder(prompts, batch_size=3, seed=5))
    skipped = [next(whole) for _ in range(4)]
    assert len(skipped) == 4
    resumed = PromptOrder(prompts, batch_size=3, seed=5)
    resumed.load_state({"position": 12})
    assert next(iter(resumed)) == next(whole)
