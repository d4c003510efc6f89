"""Compares the tokenizers of two models."""

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

FILE = "tokenizer.json"


def different_tokens(folder: str | Path, other: str | Path) -> str:
    """Returns the first difference between the token ids of the tokenizers of two folders as text;
    "" if they agree, or if one has no tokenizer.json.
    """
    files = Path(folder) / FILE, Path(other) / FILE
    if not all(file.is_file() for file in files):
        return ""
    if files[0].read_bytes() == files[1].read_bytes():
        return ""
    try:
        ours, theirs = (_vocabulary(str(file), file.stat().st_mtime_ns) for file in files)
    except Exception as error:  # the library raises nothing more exact
        return f"a {FILE} can't be read: {error}"
    for token, number in sorted(ours.items(), key=lambda pair: pair[1]):
        if theirs.get(token) != number:
            said = f"id {theirs[token]}" if token in theirs else "no token"
            return f"its tokenizer has another vocabulary: {token!r} is id {number} of the policy, and {said} of it"
    if more := theirs.keys() - ours.keys():
        return f"its tokenizer has {len(more)} tokens that the policy's lacks, {min(more)!r} among them"
    return ""


@cache
def _vocabulary(file: str, changed: int) -> dict[str, int]:
    """Returns token -> id, with added tokens. `changed`: when the file was last written."""
    found: dict[str, int] = Tokenizer.from_file(file).get_vocab(with_added_tokens=True)
    return found
