"""A real tokenizer of transformers, of single characters and a few special tokens."""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rftmega.data.tokenizer import Tokenizer as Ours
from rftmega.errors import DataError

MERGED = "=2"  # one token, across the border of prompt and answer
TURNS = "{% for m in messages %}<s>{{ m['role'][0] }}{{ m['content'] }}</s>\n{% endfor %}"
CHATML = TURNS + "{% if add_generation_prompt %}<s>a{% endif %}"
UNENDED = CHATML.replace("<s>", "").replace("</s>\n", "")
REWRITES = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tokenizer(folder: Path, template: str = "") -> Ours:
    words = ["<s>", "</s>", "<b>", "\n", *"0123456789+=abu ", MERGED]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("=", "2")]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<b>", additional_special_tokens=["<s>"])
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    return Ours(folder)


def shown(ours: Ours, ids: tuple[int, ...]) -> str:
    return ours._inner.decode(list(ids), skip_special_tokens=False)


def test_an_answer_to_plain_text_is_its_tokens_and_the_end(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path)
    assert shown(ours, ours.encode("1+", chat_template=False)) == "<b>1+"
    assert shown(ours, ours.encode_answer("1+", "12", chat_template=False)) == "12</s>"


def test_a_prompt_stays_as_it_is_generated_from_where_a_token_would_cross_the_border(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path)
    assert len(ours._inner.encode("=2", add_special_tokens=False)) == 1
    answer = ours.encode_answer("1=", "2", chat_template=False)
    assert len(answer) == 2
    assert shown(ours, answer) == "2</s>"


@pytest.mark.parametrize("prompt", ["1+1", [{"role": "user", "content": "1+1"}]])
def test_an_answer_behind_a_template_ends_where_the_template_ends_the_turn(prompt: object, tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, CHATML)
    assert shown(ours, ours.encode(prompt, chat_template=True)) == "<s>u1+1</s>\n<s>a"
    assert shown(ours, ours.encode_answer(prompt, "2", chat_template=True)) == "2</s>"


def test_an_answer_that_a_template_does_not_end_gets_an_end_and_loses_nothing(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, UNENDED)
    assert shown(ours, ours.encode_answer("1", "2", chat_template=True)) == "2</s>"
    assert shown(ours, ours.encode_answer("1", "2</s>3", chat_template=True)) == "2</s>3</s>"


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not go on with the answer"):
        tokenizer(tmp_path, REWRITES).encode_answer("1", "2", chat_template=True)
