from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rftmega.data.token_texts import Pieces

BYTES = Tokenizer(
    models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
)
BYTES.pre_tokenizer, BYTES.decoder = (
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    decoders.ByteLevel(),
)
BYTES.add_special_tokens(["<eos>"])


def text(ids: list[int]) -> str:
    return str(BYTES.decode(list(ids), skip_special_tokens=False))


@given(st.lists(st.integers(0, 256)))
def test_the_pieces_of_any_bytes_are_their_text(ids: list[int]) -> None:
    """256 tokens of a byte each and a special one: most sequences are no UTF-8 at all."""
    pieces = Pieces(text)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text(ids)


def test_a_character_of_several_tokens_is_the_last_ones_and_specials_have_names() -> None:
    ids = BYTES.encode("aé🙂b<eos>").ids
    assert Pieces(text)(ids) == ["a", "", "é", "", "", "", "🙂", "b", "<eos>"]


def test_the_space_before_a_first_token_is_kept() -> None:
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    assert words.decode([0, 2, 1]) == "ones two"
    assert Pieces(words.decode)([0, 2, 1]) == [" one", "s", " two"]
