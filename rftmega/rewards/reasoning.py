"""Removes a model's reasoning from its answers, so that only what follows it is graded."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rftmega.core.errors import ConfigError
from rftmega.rewards.part import Decode

Markers = tuple[str, str]  # that reasoning stands between
THINK = ("<think>", "</think>")
# of model families; those that a chat template writes or reads are its model's
KNOWN: tuple[Markers, ...] = (
    THINK,
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
HARMONY = "<|channel|>"  # whose template names channels apart from it
NEAR = 32  # tokens at the end of a context in which the template may have begun to reason


class Read(NamedTuple):
    """Read is a response as text, and what of it is graded."""

    response: str  # all of it, with the markers, and without other special tokens
    graded: str | None  # without reasoning; None: the reasoning is not finished


class Template(Protocol):
    """Template turns messages into text, as data.ChatTemplate does."""

    def source(self) -> str: ...


class Speller(Protocol):
    """Speller is what reading a response needs of data.Tokenizer."""

    @property
    def template(self) -> Template: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def pieces(self, token_ids: Sequence[int]) -> list[str]: ...


class Reasoning:
    """Reasoning reads responses, and knows the markers that reasoning stands between.

    A response whose reasoning has begun, by itself or at the end of its context, and does not end
    has no answer. A closing marker that nothing opened ends reasoning that began at the start.
    """

    def __init__(
        self,
        decode: Decode,
        pieces: Callable[[Sequence[int]], Sequence[str]],
        markers: Sequence[Markers] = (THINK,),
    ):
        """`decode`: text of token ids without special tokens; `pieces`: the text of each token,
        special ones by their names.
        """
        self._decode, self._pieces = decode, pieces
        self.markers = tuple(markers)
        self._opening = tuple(begin for begin, _ in self.markers)
        words = sorted({word for pair in self.markers for word in pair}, key=len, reverse=True)
        self._word = re.compile("|".join(map(re.escape, words)))

    @classmethod
    def of(cls, markers: Sequence[str], tokenizer: Speller) -> "Reasoning":
        """Returns what reads the answers of a tokenizer's model.

        `markers`: reward.reasoning_markers; empty: those of its chat template.
        """
        pairs = [(markers[0], markers[1])] if markers else markers_in(_source(tokenizer))
        return cls(tokenizer.decode, tokenizer.pieces, pairs)

    @classmethod
    def plain(cls, decode: Decode) -> "Reasoning":
        """Returns what reads tokens that are decoded one by one."""
        return cls(decode, lambda ids: [decode([each]) for each in ids])

    def refuse(self, pattern: str, option: str) -> None:
        """Raises ConfigError for a pattern that looks for a marker in what is graded."""
        for word in (word for pair in self.markers for word in pair):
            if word in pattern or re.escape(word) in pattern:
                raise ConfigError(
                    f"{option}={pattern!r} looks for {word}, but reasoning and its markers are removed before an answer is "
                    "graded. Write a pattern of what follows the reasoning, or name other markers "
                    "(reward.reasoning_markers)."
                )

    def read(self, context: Sequence[int], ids: Sequence[int]) -> Read:
        """Reads the response `ids` to `context`, token ids both."""
        begun = "".join(self._pieces(context[-NEAR:])).rstrip().endswith(self._opening)
        pieces = self._pieces(ids)
        text = "".join(pieces)
        words = list(self._word.finditer(text))
        whole = self._decode(ids)
        if not words:
            return Read(whole, None if begun else whole)
        if any(whole.count(word[0]) < text.count(word[0]) for word in words):
            whole = self._with_markers(ids, pieces, words)
        spans = self._graded(text, words, begun)
        graded = None if spans is None else self._texts(ids, pieces, spans)
        return Read(whole, None if graded is None else "".join(graded))

    def _graded(
        self, text: str, words: Sequence[re.Match[str]], begun: bool
    ) -> list[tuple[int, int]] | None:
        """Returns the places of the text outside of reasoning; None where it is not finished."""
        kept: list[tuple[int, int]] = []
        behind, inside = 0, begun
        for word in words:
            if word[0] not in self._opening:
                kept = kept if inside else []
                behind, inside = word.end(), False
            elif not inside:
                kept.append((behind, word.start()))
                inside = True
        return None if inside else [*kept, (behind, len(text))]

    def _with_markers(
        self, ids: Sequence[int], pieces: Sequence[str], words: Sequence[re.Match[str]]
    ) -> str:
        """Returns a response whose markers are special tokens, which decoding drops."""
        ends = [0, *(word.end() for word in words)]
        begins = [*(word.start() for word in words), sum(map(len, pieces))]
        between = self._texts(ids, pieces, list(zip(ends, begins, strict=True)))
        said = [
            part
            for pair in zip(between, (word[0] for word in words), strict=False)
            for part in pair
        ]
        return "".join([*said, between[-1]])

    def _texts(
        self, ids: Sequence[int], pieces: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> list[str]:
        """Returns the texts of places in the joined pieces, without special tokens."""
        places = [0]
        for piece in pieces:
            places.append(places[-1] + len(piece))
        return [self._text(ids, pieces, places, *span) for span in spans]

    def _text(
        self, ids: Sequence[int], pieces: Sequence[str], places: Sequence[int], begin: int, end: int
    ) -> str:
        """Returns the text from `begin` to `end`; a token that a marker cuts gives its own part."""
        inner = [
            at for at in range(len(ids)) if begin <= places[at] < end and places[at + 1] <= end
        ]
        if not inner:
            return "".join(pieces)[begin:end]
        head = "".join(pieces[: inner[0]])[begin:]
        tail = "".join(pieces[inner[-1] + 1 :])[: end - places[inner[-1] + 1]]
        return head + self._decode(ids[inner[0] : inner[-1] + 1]) + tail


def markers_in(template: str) -> list[Markers]:
    """Returns the markers that a chat template knows, and <think>, which prompts ask for."""
    named = [pair for pair in KNOWN[1:-1] if pair[1] in template]
    return [THINK, *named, *([KNOWN[-1]] if HARMONY in template else [])]


def _source(tokenizer: Speller) -> str:
    """Returns the chat template; "" where the tokenizer has none."""
    try:
        return tokenizer.template.source()
    except ValueError:
        return ""
