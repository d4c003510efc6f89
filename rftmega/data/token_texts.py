"""Pieces splits the text of a completion into the texts of its tokens."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete character


class Pieces:
    """Pieces returns the text of each token of a completion.

    The texts of all tokens concatenate to the text of the completion; a character encoded by
    several tokens belongs to the last of these tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """`decode` returns the text of token ids, with special tokens by name."""
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
        """Returns the text of a token: decodes the token twice in a row and removes the text of the
        first, since some decoders drop the space before a first token.
        """
        if token not in self.known:
            self.known[token] = self.decode([token, token])[len(self.decode([token])) :]
        return self.known[token]
