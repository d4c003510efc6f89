"""Protection against injected control tokens: their names in data and messages are tokenized as
plain text.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

Encoded = tuple[list[int], list[tuple[int, int]]]  # ids, and the character range of each
# Unicode noncharacters. A stand-in is a hexadecimal number in 16 of them between two delimiters,
# and passes through templates, JSON and comparisons like any word.
DIGIT, WIDTH = 0xFDD0, 5
BEGIN, END = "\ufdee", "\ufdef"
OWN_BEGIN, OWN_END = "\ufdec", "\ufded"  # around the number of a token that a template wrote
STAND_IN = re.compile(f"{BEGIN}([\ufdd0-\ufddf]{{{WIDTH}}}){END}")
# the form in templates that write JSON in ASCII
ESCAPED = re.compile(rf"\\ufdee((?:\\ufdd[0-9a-f]){{{WIDTH}}})\\ufdef")
RESERVED = re.compile("[\ufdd0-\ufdef]")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class ControlTokens:
    """ControlTokens distinguishes the control tokens of a tokenizer from text that contains their
    names.

    A control token's name in text of a dataset or an environment is replaced by a stand-in, a
    sequence of reserved characters, before the text is rendered. When the rendered text is
    tokenized, the stand-in is encoded as the letters of the name. Text without such a name is not
    changed, and costs one search.
    """

    def __init__(self, inner: Any, source: Callable[[], str]):
        """`inner`: tokenizer of transformers. `source` returns the tokenizer's chat template, or ""
        if it has none.
        """
        self._inner, self._source = inner, source
        added: dict[int, Any] = inner.added_tokens_decoder
        self._added = {str(token): number for number, token in added.items()}
        self._by_number = {number: name for name, number in self._added.items()}
        self._flags = {str(token): token for token in added.values()}
        special = [name for name, token in self._flags.items() if token.special]
        self._names = sorted(special, key=len, reverse=True)
        self._special = _any_of(self._names)

    def found(self, value: Any, *, words: bool = False) -> list[str]:
        """Returns the names of control tokens in a text, or in all texts of messages, once per
        occurrence. `words`: also finds tokens that the chat template writes, such as <tool_call>,
        which a tokenizer need not mark as special.
        """
        pattern = self._all if words else self._special
        return [name for text in _texts(value) for name in pattern.findall(text)]

    def hidden(self, value: Any, *, words: bool = False, but: Collection[str] = ()) -> Any:
        """Returns `value` (a text or messages) with each name that `found` returns replaced by a
        stand-in, which `encode` encodes as the letters of the name. `words`: as in `found`. Names
        in `but` stay unchanged.
        """
        pattern = self._all if words else self._special

        def stand_in(name: re.Match[str]) -> str:
            return name[0] if name[0] in but else BEGIN + _digits(self._added[name[0]]) + END

        def hide(text: str) -> str:
            if RESERVED.search(text):  # only text that imitates stand-ins contains them
                text = RESERVED.sub(UNKNOWN, text)
            return pattern.sub(stand_in, text)

        return _mapped(value, hide)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of a text that may contain stand-ins (see `hidden`); a stand-in is
        encoded as the letters of its control token's name.
        """
        if BEGIN not in text:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens))
        return self._apart(text, add_special_tokens)[0]

    def encode_places(self, text: str) -> Encoded:
        """Returns the token ids of `text` and the character range of each token. Requires a fast
        tokenizer.
        """
        if BEGIN in text:
            return self._apart(text, False)
        found = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), list(found["offset_mapping"])

    @cached_property
    def _all(self) -> re.Pattern[str]:
        template = self._source()
        words = [name for name in self._added if name in template]
        return _any_of(sorted({*self._names, *words}, key=len, reverse=True))

    @cached_property
    def _parts(self) -> re.Pattern[str]:
        return re.compile(f"{STAND_IN.pattern}|{self._all.pattern}|[{OWN_BEGIN}{OWN_END}]")

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """Returns a copy of the tokenizer in which control tokens have the names that `_own`
        returns, and a dictionary from the ids of the renamed tokens to the original ids.
        """
        copy: Any = Tokenizer.from_str(self._inner.backend_tokenizer.to_str())
        names = [name for name in self._added if self._all.fullmatch(name)]
        copy.add_special_tokens([AddedToken(name, special=True) for name in names])
        copy.encode_special_tokens = True
        copy.add_tokens([self._renamed(name) for name in names])
        ids = {copy.token_to_id(self._own(name)): self._added[name] for name in names}
        return copy, ids

    def _own(self, name: str) -> str:
        return OWN_BEGIN + _digits(self._added[name]) + OWN_END

    def _renamed(self, name: str) -> AddedToken:
        """Returns the token that stands for the control token `name` in the tokenizer's copy: it
        has the name `_own(name)` and strips spaces like the original token.
        """
        flags = self._flags[name]
        return AddedToken(
            self._own(name),
            lstrip=flags.lstrip,
            rstrip=flags.rstrip,
            single_word=flags.single_word,
            normalized=False,
            special=False,
        )

    def _apart(self, text: str, add_special_tokens: bool) -> Encoded:
        """Returns the token ids of a text that contains stand-ins, and the character range of each
        token. With a slow tokenizer, the list of ranges is empty.
        """
        if not self._inner.is_fast:  # slow tokenizers take no options: a space splits the name
            told = STAND_IN.sub(lambda found: _parted(self._name(found[1])), text)
            return list(self._inner.encode(told, add_special_tokens=add_special_tokens)), []
        copy, ids = self._copy
        pieces, places = [], []
        for piece, start, stop in self._pieces(text):
            pieces.append(piece)
            places += [(start, stop)] * len(piece)
        found = copy.encode("".join(pieces), add_special_tokens=add_special_tokens)
        spans = [(places[a][0], places[b - 1][1]) if a < b else (0, 0) for a, b in found.offsets]
        return [ids.get(each, each) for each in found.ids], spans

    def _pieces(self, text: str) -> Iterable[tuple[str, int, int]]:
        """Splits `text` and yields (input, start, stop) for each section: the text that `_copy`
        encodes in place of the section, and the section's character range.
        """
        at = 0
        for found in self._parts.finditer(text):
            yield from _letters(text, at, found.start())
            yield self._piece(found), found.start(), found.end()
            at = found.end()
        yield from _letters(text, at, len(text))

    def _piece(self, found: re.Match[str]) -> str:
        """Returns the text that `_copy` encodes in place of a match of `_parts`: the letters of a
        stand-in's name, or the changed name of a control token that the template wrote.
        """
        if found[1]:
            return self._name(found[1])
        return self._own(found[0]) if found[0] in self._added else UNKNOWN

    def _name(self, digits: str) -> str:
        number = int("".join(f"{ord(each) - DIGIT:x}" for each in digits), 16)
        return self._by_number.get(number, UNKNOWN)


def unescaped(text: str) -> str:
    """Restores stand-ins that a template wrote as ASCII escapes in JSON."""
    if r"\ufdee" not in text:
        return text
    return ESCAPED.sub(lambda found: found[0].encode().decode("unicode_escape"), text)


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def _digits(number: int) -> str:
    return "".join(chr(DIGIT + int(each, 16)) for each in f"{number:0{WIDTH}x}")


def _letters(text: str, start: int, stop: int) -> Iterable[tuple[str, int, int]]:
    yield from ((text[at], at, at + 1) for at in range(start, stop))


def _parted(name: str) -> str:
    return f"{name[:1]} {name[1:]}"


def _texts(value: Any) -> Iterable[str]:
    """Yields all texts of a value, including the keys of dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from _texts(key)
            yield from _texts(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns `value` with `change` applied to all its texts, including the keys of dictionaries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(inside, change) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inside, change) for inside in value]
    return value
