import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data.preference import load_preferences, pair_rows
from rftmega.data.sampler import PromptOrder
from rftmega.data.supervised import Example, load_supervised, rows_of

END = 9


class Everything:
    """A chat template that renders all there is, with the roles of OpenAI alone."""

    def roles(self) -> tuple[str, ...]:
        return ()

    @property
    def unrendered(self) -> "Everything":
        return self

    def of(self, messages: Any, *, open_: bool) -> tuple[tuple[int, str], ...]:
        return ()


class Letters:
    """One token a character; chat messages are their role's letter and their text; an answer ends
    in END.
    """

    template = Everything()

    def encode(self, prompt: Any, *, chat_template: bool) -> tuple[int, ...]:
        text = (
            prompt
            if isinstance(prompt, str)
            else "".join(m["role"][0] + m["content"] for m in prompt)
        )
        return tuple(ord(c) for c in text)

    def encode_response(
        self, prompt: Any, completion: str, *, chat_template: bool
    ) -> tuple[int, ...]:
        return (*self.encode(completion, chat_template=False), END)


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in text)


def load(folder: Path, text: str, loader: Any = load_supervised, **settings: Any) -> list[Any]:
    (folder / "a.jsonl").write_text(text)
    config = DataConfig(**settings)
    return loader(folder / "a.jsonl", Letters(), config, max_prompt_tokens=6, max_response_tokens=4)


USER, COMPLETION = '{"role": "user", "content": "x"}', '{"role": "assistant", "content": "yz"}'


@pytest.mark.parametrize(
    ("record", "prompt", "response"),
    [
        ('{"prompt": "ab", "response": "cd"}', "ab", "cd"),
        (f'{{"prompt": [{USER}], "response": "cd"}}', "ux", "cd"),
        (f'{{"prompt": [{USER}], "response": [{COMPLETION}]}}', "ux", "yz"),
        (f'{{"prompt": [{USER}, {COMPLETION}]}}', "ux", "yz"),
        (f'{{"prompt": [{USER}, {COMPLETION}], "response": null}}', "ux", "yz"),
        (f'{{"prompt": [{COMPLETION}, {USER}, {COMPLETION}]}}', "ayzux", "yz"),
    ],
)
def test_the_last_answer_is_trained_with_its_end(
    record: str, prompt: str, response: str, tmp_path: Path
) -> None:
    assert load(tmp_path, record) == [Example(ids(prompt), (*ids(response), END))]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ('{"prompt": "ab"}', 'no "response" among the keys'),
        ('{"response": "ab"}', 'no "prompt" among the keys'),
        (
            '{"prompt": "ab", "response": ""}',
            '"response" must be a string or one message of the assistant, and not empty',
        ),
        (f'{{"prompt": "ab", "response": [{USER}]}}', "one message of the assistant"),
        (
            f'{{"prompt": "ab", "response": [{COMPLETION}, {COMPLETION}]}}',
            "one message of the assistant",
        ),
        ('{"prompt": "ab", "response": 7}', "must be a string"),
        (
            f'{{"prompt": [{USER}, {COMPLETION}], "response": "b"}}',
            '"prompt" ends with an answer and "response" is another',
        ),
        (
            f'{{"prompt": [{COMPLETION}]}}',
            '"prompt" must be a string or a list of chat messages, and not empty',
        ),
        (
            '{"prompt": [{"role": "assistant", "content": null}, 3]}',
            'message 0 of "prompt" has no content: it is null',
        ),
        (
            f'{{"prompt": [{USER}, {COMPLETION}, {COMPLETION}]}}',
            '"prompt" has two messages of the assistant behind each other',
        ),
        (
            '{"prompt": "abcdefg", "response": "b"}',
            "the prompt has 7 tokens, rollout.max_prompt_tokens is 6",
        ),
        (
            '{"prompt": "a", "response": "abcd"}',
            "the answer has 5 tokens, rollout.max_response_tokens is 4",
        ),
    ],
)
def test_a_record_without_a_prompt_and_an_answer_is_named(
    record: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: ") as caught:
        load(tmp_path, record)
    assert complaint in str(caught.value)


def test_long_prompts_and_long_answers_are_dropped_with_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [("a", "b"), ("abcdefg", "b"), ("a", "abcd")]
    text = "\n".join(
        f'{{"prompt": "{prompt}", "response": "{completion}"}}' for prompt, completion in lines
    )
    assert len(load(tmp_path, text, too_long="drop")) == 1
    assert "dropped 2 of 3 examples" in caplog.text


def test_keys_are_the_configs(tmp_path: Path) -> None:
    found = load(tmp_path, '{"q": "ab", "a": "cd"}', prompt_key="q", response_key="a")
    assert found == [Example(ids("ab"), (*ids("cd"), END))]
    (pair,) = load(
        tmp_path,
        '{"q": "a", "y": "b", "n": "c"}',
        load_preferences,
        prompt_key="q",
        chosen_key="y",
        rejected_key="n",
    )
    assert (pair.chosen.response_ids[0], pair.rejected.response_ids[0]) == (ord("b"), ord("c"))


def test_rows_teach_the_answer_and_nothing_else() -> None:
    rows = rows_of([Example((1, 2, 3), (0, END)), Example((4,), (5, 6, 7, END))])
    assert rows.tokens.tolist() == [[1, 2, 3, 0, END], [4, 5, 6, 7, END]]
    assert (rows.prompt_lengths.tolist(), rows.lengths.tolist()) == ([3, 1], [5, 5])
    assert rows.mask.tolist() == [[False, False, True, True], [True] * 4]
    short = rows_of([Example((1,), (END,)), Example((4,), (5, 6, END))])
    assert short.tokens.tolist() == [[1, END, 0, 0], [4, 5, 6, END]]
    assert short.mask.tolist() == [[True, False, False], [True] * 3]


def test_what_is_said_between_two_trained_answers_is_not_trained() -> None:
    two = Example((1, 2), (3, END, 4, 5, 6, END), (range(2, 4),))
    rows = rows_of([two, Example((7,), (8, END))])
    assert rows.tokens[0, 1:][rows.mask[0]].tolist() == [3, END, 6, END]
    assert rows.tokens[1, 1:][rows.mask[1]].tolist() == [8, END]
    assert (rows.prompt_lengths.tolist(), rows.lengths.tolist()) == ([2, 1], [8, 3])


def test_batches_of_rows_come_in_the_seeded_order_and_resume() -> None:
    examples = [Example((i,), (END,)) for i in range(5)]
    order = PromptOrder(examples, batch_size=2, seed=1, collate=rows_of)
    batches = [rows.tokens[:, 0].tolist() for rows in itertools.islice(order, 5)]
    assert sorted(sum(batches, [])[:5]) == list(range(5))
    assert order.position == 10
    resumed = PromptOrder(examples, batch_size=2, seed=1, collate=rows_of)
    resumed.load_state({"position": 4})
    assert next(iter(resumed)).tokens[:, 0].tolist() == batches[2]


def test_pairs_are_side_by_side_with_a_place_for_the_score_behind_each(tmp_path: Path) -> None:
    lines = '{"prompt": "ab", "chosen": "c", "rejected": "def"}\n{"prompt": "x", "chosen": "yz", "rejected": "y"}\n'
    rows = pair_rows(load(tmp_path, lines, load_preferences))
    texts = ["abc", "abdef", "xyz", "xy"]
    assert rows.tokens.tolist() == [[*ids(text), END] + [0] * (6 - len(text)) for text in texts]
    assert rows.lengths.tolist() == [len(text) + 2 for text in texts]
    assert rows.prompt_lengths.tolist() == [2, 2, 1, 1]
    # What Passes feeds of a row: all but its last place, that is the whole answer.
    fed = torch.arange(rows.tokens.shape[1] - 1) < rows.lengths[:, None] - 1
    assert [rows.tokens[b, :-1][fed[b]].tolist() for b in range(4)] == [
        [*ids(text), END] for text in texts
    ]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ('{"prompt": "a", "chosen": "b"}', 'no "rejected" among the keys'),
        ('{"chosen": "b", "rejected": "c"}', 'no "prompt" among the keys'),
        ('{"prompt": "a", "rejected": "b"}', 'no "chosen" among the keys'),
        ('{"prompt": "a", "chosen": "b", "rejected": null}', '"rejected" must be a string'),
        ('{"prompt": "a", "chosen": "b", "rejected": "abcd"}', "the answer has 5 tokens"),
    ],
)
def test_a_record_that_is_no_pair_is_named(record: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: ") as caught:
        load(tmp_path, record, load_preferences)
    assert complaint in str(caught.value)
