"""Multiple-choice reward: extracts the letter that a response chooses."""

import re
import unicodedata

_BOXED = re.compile(
    r"\\(?:boxed|fbox|framebox)\s*\{\s*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?(?P<said>[^{}]*)\}"
)
_OPEN, _CLOSE = r"[ \t*$({\[]*+", r"[)\]}*$]*+"
_BECAUSE = r"(?:because|since|as)\b"
# what may follow a letter that ends a statement: not "if", not a noun ("It's B vitamins")
_ENDS = rf"(?=\s*+(?:[.;:!]|$|{_BECAUSE}|,(?!\s*(?:if|only|when|unless|provided|assuming|but)\b))|\s*\n)"
_BEGINS = r"(?:(?m:^)|(?<=[.!;:])\s|\b(?i:so|thus|therefore|hence|clearly|conclude\s+that)\b,?\s)[ \t*>#-]*+"
# Loops are possessive (*+): two adjacent ones that backtrack would try every way
# to split white space.
_STATED = re.compile(
    r"(?i:\b(?:answer|choice|(?:correct|right|best|final)\s++(?:option|letter))\b"
    r"(?:\s++(?:is|(?:should|must|would|will|has\s++to)\s++be)\b(?:\s++(?:thus|therefore|hence|clearly)\b)?+)?+"
    r"[\s:*]*+(?:(?:option|choice)\b)?+)[\s*$({\[]*+(?P<said>[A-Za-z])(?![A-Za-z0-9'^_]|\s*=)"
    r"(?!(?<=[AaI])\s+(?!(?:and|as|because|or|since)\b)[a-z])"  # "the answer is a number"
)
_CHOSEN = (
    # "I think it's D", "So it must be D", "I'd go with option D"
    re.compile(
        rf"(?:{_BEGINS}|\b(?i:I(?:\s++would|['’]d)?\s++(?:think|believe|guess|say)(?:\s++that)?)\s)"
        rf"(?i:it(?:['’]s|\s++is|\s++(?:must|has\s++to)\s++be)\s++(?:option\s++|choice\s++)?){_OPEN}(?P<said>[A-Z])(?![A-Za-z0-9']){_CLOSE}{_ENDS}"
    ),
    re.compile(
        r"\bI(?:\s++(?:would|will)|['’](?:d|ll|m))?\s++(?i:choose|pick|select|go\s++with|going\s++with)\s++(?i:option\s++|choice\s++|answer\s++)?"
        rf"{_OPEN}(?P<said>[A-Z])(?![A-Za-z0-9']){_CLOSE}{_ENDS}"
    ),
    # "So B is correct.", "Option B is the right answer"
    re.compile(
        rf"{_BEGINS}(?i:(?:option|choice|answer)\s++)?+{_OPEN}(?P<said>[A-Z]){_CLOSE}\s++is\s++"
        rf"(?:(?:the\s++)?(?:only\s++)?(?:correct|right|best)(?:\s++(?:answer|option|choice|one))?|the\s++answer){_CLOSE}{_ENDS}"
    ),
    re.compile(
        rf"(?:(?:答案|正确选项)\s*+(?:应该?)?(?:是|为|选|:)+|(?<![不别非没勿未误])选择?\s*+:?){_OPEN}(?P<said>[A-Z])(?![A-Za-z0-9'])(?!\s*+(?:不|错|是错|是不))"
    ),
    re.compile(
        r"(?:(?m:^)|[。.;,]|所以|因此|故)[ \t]*+(?:选项)?+[ \t]*+(?P<said>[A-Z])"
        r"\s*+(?:选?项)?\s*+是?正确(?:的|答案|选项)*(?=[。.,;!\s]|$)"
    ),
)
_MENTIONED = re.compile(
    r"\((?P<paren>[A-Z])\)|(?m:^)[ \t*>#-]*(?P<first>[A-Z])[.:)](?=\s|$)|(?<=\s)(?P<last>[A-Z])\.(?=\W*$)"
)
_ALONE = re.compile(r"\W*([A-Za-z])\W*")
_JOIN = r"(?:[,/&、或和与]|\band\b|\bor\b)(?:\s*or\b)?"
_MORE_AFTER = re.compile(rf"[)\]}}*$.]*\s*{_JOIN}\s*(?i:option\s+)?[*$(\[]*[A-Z](?![A-Za-z0-9'])")
_MORE_BEFORE = re.compile(rf"(?<![A-Za-z0-9])[A-Z][)\]}}*$]*\s*{_JOIN}\s*(?i:option\s+)?$")


def chosen_letter(response: str) -> str | None:
    """Returns the last choice that the response states, as a capital letter.

    Returns None if the response states no choice or an ambiguous one. "Answer: B", "the answer is
    (B)", "So B is correct.", "I think it's B", "答案是B" and a boxed B are statements, and the last
    of them counts. Without any statement, the last mention counts: "(B)" anywhere, "B." or "B)" at
    the start of a line or "B." at the end of the text; a response that is a single letter also
    counts. Letters joined by a comma, a slash, "and" or "or" are ambiguous, and so is a box that
    contains anything but one letter.
    """
    response = unicodedata.normalize("NFKC", response)  # full-width letters and brackets
    if alone := _ALONE.fullmatch(response):
        return alone[1].upper()
    stated = [match for form in (_BOXED, _STATED, *_CHOSEN) for match in form.finditer(response)]
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
