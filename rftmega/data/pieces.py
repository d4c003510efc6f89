"""The text of each token of an answer."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of a part of a character


class Pieces:
    """Splits text by its tokens.

    Together the pieces are the text; a character made of several tokens is the last one's.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """`decode`: text of token ids, special tokens included."""
        self.decode = decode
        self.known: dict[int, str] = {}  # text of a token that follows another

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        begin = 0  # of the tokens whose text is still to come
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
        """Decodes a token after itself: some decoders drop the space before a first token."""
        if token not in self.known:
            self.known[token] = self.decode([token, token])[len(self.decode([token])) :]
        return self.known[token]
