"""The text of each token of a completion."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete character


class Pieces:
    """Splits text by its tokens.

    The pieces concatenate to the text; a character of several tokens belongs to the last one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """`decode`: text of token ids, special tokens included."""
        self.decode = decode
        self.known: dict[int, str] = {}  # text of a token that follows another

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        begin = 0  # of the tokens whose text is pending
        for end, token in enumerate(token_ids, start=1):
            text = self._piece(token) if begin == end - 1 else INCOMPLETE
            if INCOMPLETE in text:
                text = self.decode(token_ids[begin:end])
                if text.endswith(INCOMPLETE) and end < len(token_ids):
                    found.append("")
                    continue
            found.append(text)
            begin = end
        return found

    def _piece(self, token: int) -> str:
        """Decodes a token after itself, since some decoders drop the space before a first token."""
        if token not in self.known:
            self.known[token] = self.decode([token, token])[len(self.decode([token])) :]
        return self.known[token]
