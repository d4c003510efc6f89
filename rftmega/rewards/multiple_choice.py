"""Multiple-choice reward: extracts the letter that a response chooses."""

import re

_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?(?P<said>[^{}]*)\}")
# Loops are possessive (*+): two adjacent ones that backtrack would try every way
# to split white space.
_STATED = re.compile(
    r"(?i:\b(?:answer|choice)\b(?:\s++is\b)?+[\s:*]*+(?:(?:option|choice)\b)?+)[\s*$({\[]*+(?P<said>[A-Za-z])(?![A-Za-z0-9'])"
    r"(?!(?<=[AaI])\s+(?!(?:and|as|because|or|since)\b)[a-z])"  # "the answer is a number"
)
_MENTIONED = re.compile(
    r"\((?P<paren>[A-Z])\)|(?m:^)[ \t*>#-]*(?P<first>[A-Z])[.:)](?=\s|$)|(?<=\s)(?P<last>[A-Z])\.(?=\W*$)"
)
_ALONE = re.compile(r"\W*([A-Za-z])\W*")
_JOIN = r"(?:,|/|&|\band\b|\bor\b)(?:\s*or\b)?"
_MORE_AFTER = re.compile(rf"[)\]}}*$.]*\s*{_JOIN}\s*(?i:option\s+)?[*$(\[]*[A-Z](?![A-Za-z0-9'])")
_MORE_BEFORE = re.compile(rf"(?<![A-Za-z0-9])[A-Z][)\]}}*$]*\s*{_JOIN}\s*(?i:option\s+)?$")


def chosen_letter(response: str) -> str | None:
    """Returns the last choice that the response states, as a capital letter.

    Returns None if the response states no choice or an ambiguous one. "Answer: B", "the answer is
    (B)" and a boxed B are statements, and the last of them counts. Without any statement, the last
    mention counts: "(B)" anywhere, "B." or "B)" at the start of a line or "B." at the end of the
    text; a response that is a single letter also counts. Letters joined by a comma, a slash, "and"
    or "or" are ambiguous, and so is a box that contains anything but one letter.
    """
    if alone := _ALONE.fullmatch(response):
        return alone[1].upper()
    stated = [*_BOXED.finditer(response), *_STATED.finditer(response)]
    found = max(stated, key=lambda match: match.end(), default=None) or _last(_MENTIONED, response)
    if (
        found is None
        or _MORE_AFTER.match(response, found.end())
        or _MORE_BEFORE.search(response[: found.start()])
    ):
        return None
    (said,) = (text for text in found.groupdict().values() if text is not None)
    said = said.strip().strip("().")
    return said.upper() if len(said) == 1 and said.isascii() and said.isalpha() else None


def multiple_choice(response: str, label: str) -> float:
    """Returns 1 if the response chooses the label's letter, else 0."""
    return float(chosen_letter(response) == label.strip().upper())


def complaint(label: str) -> str | None:
    """Returns the reason why `label`, the letter of the right choice, is invalid; None if it is
    valid.
    """
    letter = label.strip()
    return (
        None
        if len(letter) == 1 and letter.isascii() and letter.isalpha()
        else f"the label {label!r} is not one letter"
    )


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found
