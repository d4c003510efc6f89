"""Removes a model's reasoning from its responses, so that only the remaining text is graded."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rftmega.core.errors import ConfigError
from rftmega.rewards.part import Decode

Markers = tuple[str, str]  # opening and closing marker of reasoning
THINK = ("<think>", "</think>")
# of known models; a model uses those that occur in its chat template
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
HARMONY = "<|channel|>"  # its template writes channel names separately
NEAR = 32  # tokens at the end of a context in which the template may have begun to reason


class Read(NamedTuple):
    """Read is a response as text, and `graded`, its part without reasoning, which rewards grade;
    None if the reasoning is unfinished.
    """

    response: str  # whole text, with reasoning markers but without other special tokens
    graded: str | None  # text without reasoning; None: unfinished reasoning


class Template(Protocol):
    """Template is a chat template, such as data.ChatTemplate; `source` returns its Jinja text."""

    def source(self) -> str: ...


class Speller(Protocol):
    """Speller is the interface of data.Tokenizer that reading responses needs: the chat template,
    and decoding of token ids to text or to one text per token.
    """

    @property
    def template(self) -> Template: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def pieces(self, token_ids: Sequence[int]) -> list[str]: ...


class Reasoning:
    """Reasoning separates the reasoning in a response, which stands between markers such as <think>
    and </think>, from the rest of the response.

    If reasoning begins, in the response or at the end of its context, and does not end, there is
    nothing to grade. A closing marker without an opening one ends reasoning that began at the start
    of the response.
    """

    def __init__(
        self,
        decode: Decode,
        pieces: Callable[[Sequence[int]], Sequence[str]],
        markers: Sequence[Markers] = (THINK,),
    ):
        """`decode`: converts token ids to text without special tokens. `pieces`: returns the text
        of each token, with special tokens by their names. `markers`: pairs of an opening and a
        closing marker of reasoning.
        """
        self._decode, self._pieces = decode, pieces
        self.markers = tuple(markers)
        self._opening = tuple(begin for begin, _ in self.markers)
        words = sorted({word for pair in self.markers for word in pair}, key=len, reverse=True)
        self._word = re.compile("|".join(map(re.escape, words)))

    @classmethod
    def of(cls, markers: Sequence[str], tokenizer: Speller) -> "Reasoning":
        """Returns a Reasoning for responses of the model that the tokenizer belongs to.

        `markers`: the value of reward.reasoning_markers, (opening, closing); empty: uses the
        markers in the model's chat template.
        """
        pairs = [(markers[0], markers[1])] if markers else markers_in(_source(tokenizer))
        return cls(tokenizer.decode, tokenizer.pieces, pairs)

    @classmethod
    def plain(cls, decode: Decode) -> "Reasoning":
        """Returns a Reasoning with the markers <think> and </think>, for tokenizers whose tokens
        can be decoded one by one.
        """
        return cls(decode, lambda ids: [decode([each]) for each in ids])

    def refuse(self, pattern: str, option: str) -> None:
        """Raises ConfigError if `pattern`, the value of `option`, searches for a reasoning marker,
        which graded text never contains.
        """
        for word in (word for pair in self.markers for word in pair):
            if word in pattern or re.escape(word) in pattern:
                raise ConfigError(
                    f"{option}={pattern!r} looks for {word}, but reasoning and its markers are removed before an answer is "
                    "graded. Write a pattern of what follows the reasoning, or name other markers "
                    "(reward.reasoning_markers)."
                )

    def read(self, context: Sequence[int], ids: Sequence[int]) -> Read:
        """Returns the text of a response and the part of it that is graded. `ids`: the response's
        token ids; `context`: the token ids before the response.
        """
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
        """Returns the spans (begin, end) of `text` outside of reasoning; None if reasoning is
        unfinished. `words`: matches of reasoning markers in `text`; `begun`: the context before the
        response ends in an opening marker.
        """
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
        """Returns the text of a response including reasoning markers that are special tokens, which
        decoding drops. `ids`, `pieces`: token ids and texts of the response; `words`: matches of
        markers in the joined pieces.
        """
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
        """Returns the text of each span (begin, end) of the response without special tokens. Spans
        are character positions in the joined `pieces`, the texts of the tokens `ids`.
        """
        places = [0]
        for piece in pieces:
            places.append(places[-1] + len(piece))
        return [self._text(ids, pieces, places, *span) for span in spans]

    def _text(
        self, ids: Sequence[int], pieces: Sequence[str], places: Sequence[int], begin: int, end: int
    ) -> str:
        """Returns the text from character position `begin` to `end` of the joined `pieces`, without
        special tokens. `places`: position at which each piece starts. A token that a marker cuts
        contributes only its characters within these positions.
        """
        inner = [
            at for at in range(len(ids)) if begin <= places[at] < end and places[at + 1] <= end
        ]
        if not inner:
            return "".join(pieces)[begin:end]
        head = "".join(pieces[: inner[0]])[begin:]
        tail = "".join(pieces[inner[-1] + 1 :])[: end - places[inner[-1] + 1]]
        return head + self._decode(ids[inner[0] : inner[-1] + 1]) + tail


def markers_in(template: str) -> list[Markers]:
    """Returns the pairs (opening, closing) of reasoning markers that occur in a chat template, and
    <think>, because a prompt may ask for it.
    """
    named = [pair for pair in KNOWN[1:-1] if pair[1] in template]
    return [THINK, *named, *([KNOWN[-1]] if HARMONY in template else [])]


def _source(tokenizer: Speller) -> str:
    """Returns the source of the chat template; "" if the tokenizer has none."""
    try:
        return tokenizer.template.source()
    except ValueError:
        return ""
