"""A real tokenizer of transformers, of single characters and a few special tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rftmega.config import DataConfig
from rftmega.core.errors import CheckpointError, DataError
from rftmega.data.tokenizer import Chat
from rftmega.data.tokenizer import Tokenizer as Ours

MERGED = "=2"  # one token, across the border of prompt and answer
TURNS = "{% for m in messages %}<s>{{ m['role'][0] }}{{ m['content'] }}</s>\n{% endfor %}"
CHATML = TURNS + "{% if add_generation_prompt %}<s>a{% endif %}"
UNENDED = CHATML.replace("<s>", "").replace("</s>\n", "")
REWRITES = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tokenizer(
    folder: Path, template: str = "", chat: Chat | None = None, control_tokens: str = "reject"
) -> Ours:
    words = ["<s>", "</s>", "<b>", "\n", *"0123456789+=abu ", MERGED]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("=", "2")]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<b> $A", special_tokens=[("<b>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", bos_token="<b>", additional_special_tokens=["<s>"]
    )
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    return Ours(folder, chat=chat, control_tokens=control_tokens)


def shown(ours: Ours, ids: tuple[int, ...]) -> str:
    return ours._inner.decode(list(ids), skip_special_tokens=False)


def test_an_answer_to_plain_text_is_its_tokens_and_the_end(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path)
    assert shown(ours, ours.encode("1+", chat_template=False)) == "<b>1+"
    assert shown(ours, ours.encode_response("1+", "12", chat_template=False)) == "12</s>"


def test_a_prompt_stays_as_it_is_generated_from_where_a_token_would_cross_the_border(
    tmp_path: Path,
) -> None:
    ours = tokenizer(tmp_path)
    assert len(ours._inner.encode("=2", add_special_tokens=False)) == 1
    completion = ours.encode_response("1=", "2", chat_template=False)
    assert len(completion) == 2
    assert shown(ours, completion) == "2</s>"


@pytest.mark.parametrize("prompt", ["1+1", [{"role": "user", "content": "1+1"}]])
def test_an_answer_behind_a_template_ends_where_the_template_ends_the_turn(
    prompt: object, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path, CHATML)
    assert shown(ours, ours.encode(prompt, chat_template=True)) == "<s>u1+1</s>\n<s>a"
    assert shown(ours, ours.encode_response(prompt, "2", chat_template=True)) == "2</s>"


def test_an_answer_that_a_template_does_not_end_gets_an_end_and_loses_nothing(
    tmp_path: Path,
) -> None:
    ours = tokenizer(tmp_path, UNENDED, control_tokens="control")
    assert shown(ours, ours.encode_response("1", "2", chat_template=True)) == "2</s>"
    assert shown(ours, ours.encode_response("1", "2</s>3", chat_template=True)) == "2</s>3</s>"


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not go on with the answer"):
        tokenizer(tmp_path, REWRITES).encode_response("1", "2", chat_template=True)


@pytest.mark.parametrize("config", [{"vocab_size": 20}, {"text_config": {"vocab_size": 20}}])
def test_a_token_that_the_model_does_not_know_is_refused_with_both_numbers(
    config: dict[str, object], tmp_path: Path
) -> None:
    """A token was added, and the embedding was not enlarged; all but the merged one are known."""
    tokenizer(tmp_path, CHATML)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = Ours(tmp_path)
    assert ours.encode("1 ", chat_template=False)[-1] == 19
    asked = [
        lambda: ours.encode("1=2", chat_template=False),
        lambda: ours.encode_response("1", "=2", chat_template=False),
    ]
    asked += [
        lambda: ours.encode("=2", chat_template=True),
        lambda: ours.encode_response("1", "=2", chat_template=True),
    ]
    said = r"the tokenizer gives '=2' the id 20, but the model knows 20 tokens \(vocab_size in config.json\)"
    for ask in asked:
        with pytest.raises(DataError, match=said):
            ask()


@pytest.mark.parametrize(("eos", "said"), [([1, 10], "the id 10"), (99, "the id 99")])
def test_an_end_that_the_model_does_not_know_is_refused_at_the_start(
    eos: int | list[int], said: str, tmp_path: Path
) -> None:
    tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 10}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(
        CheckpointError,
        match=rf"no completion could end as it should: .*{said}, but the model knows 10 tokens",
    ):
        Ours(tmp_path)


@pytest.mark.parametrize("eos", ["2", [1, "2"], True, 1.5, -1, [[1]], {}, 2**70])
def test_an_end_that_is_no_id_is_refused(eos: object, tmp_path: Path) -> None:
    tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(
        CheckpointError,
        match=r"generation_config\.json: eos_token_id=.* is neither a token's id nor a list",
    ):
        Ours(tmp_path)


def test_generation_config_with_a_byte_order_mark_is_read_and_its_ends_count(
    tmp_path: Path,
) -> None:
    tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"eos_token_id": [3, 1]}).encode()
    )
    assert Ours(tmp_path).stop_ids == [1, 3]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("generation_config.json", b"garbage", r"generation_config\.json:1: not JSON"),
        ("generation_config.json", b"[1]", r"generation_config\.json holds a list, not an object"),
        (
            "generation_config.json",
            b'{"eos_token_id": 1,\n"eos_token_id": 2}',
            r":2: the key 'eos_token_id' is there twice",
        ),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json holds a list, not an object"),
        (
            "tokenizer_config.json",
            b"\xef\xbb\xbf{}",
            r"byte-order mark, which transformers can't read",
        ),
        (
            "tokenizer_config.json",
            b'{"model_max_length": []}',
            r"holds no tokenizer that transformers can read: TypeError",
        ),
        ("tokenizer.json", b"{}", r"holds no tokenizer that transformers can read: KeyError"),
        ("tokenizer.json", b"\x00\xff", r"tokenizer\.json:1: not UTF-8"),
        ("special_tokens_map.json", b"[]", r"special_tokens_map\.json holds a list, not an object"),
        (
            "config.json",
            b'{"vocab_size": "128"}',
            r"config\.json: vocab_size=128 is no whole number",
        ),
        (
            "config.json",
            b'{"text_config": {"vocab_size": "128"}}',
            r"config\.json: vocab_size=128 is no whole number",
        ),
    ],
)
def test_a_file_that_can_not_be_read_is_named(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        Ours(tmp_path)


def test_a_system_prompt_stands_before_messages_that_have_none(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, CHATML, Chat(system="b"))  # it knows no letter s
    assert shown(ours, ours.encode("1+", chat_template=True)) == "<s>b</s>\n<s>u1+</s>\n<s>a"
    own = [{"role": "system", "content": "0"}, {"role": "user", "content": "1+"}]
    assert shown(ours, ours.encode(own, chat_template=False)) == "<s>0</s>\n<s>u1+</s>\n<s>a"
    assert shown(ours, ours.encode_response(own, "2", chat_template=False)) == "2</s>"


def test_a_template_of_a_file_is_used_with_what_is_given_to_it(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML + "{% if thinking %}={% endif %}")
    config = DataConfig(chat_template_file=str(file), chat_template_kwargs={"thinking": True})
    ours = tokenizer(tmp_path, REWRITES, Chat.of(config))
    assert shown(ours, ours.encode("1+", chat_template=True)) == "<s>u1+</s>\n<s>a="
    without = tokenizer(tmp_path, REWRITES)
    assert shown(without, without.encode("1+", chat_template=True)) == "11+"


def test_a_word_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    template = CHATML + "{% if thinking %}={% endif %}"
    with pytest.raises(DataError, match="reads no thinkng. Did you mean thinking?"):
        tokenizer(tmp_path, template, Chat(given={"thinkng": True}))


def test_options_of_the_template_are_refused_where_a_prompt_does_not_go_through_it(
    tmp_path: Path,
) -> None:
    ours = tokenizer(tmp_path, CHATML, Chat(system="b"))
    with pytest.raises(DataError, match="Set data.chat_template=true, or give messages"):
        ours.encode("1+", chat_template=False)
