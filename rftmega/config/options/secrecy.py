"""Markers of options that hold secrets, and strings that know the reference (${...}) they came
from.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Hidden:
    """Hidden marks an option whose secrets are not stored, published or quoted. `part` "all" hides
    the whole value, "values" hides the values of a mapping but not its keys, "arguments" hides the
    arguments of a command but not its program and the names of its --long options.
    """

    part: Literal["all", "values", "arguments"]


SecretText = Annotated[str, Hidden("all")]
SecretValues = Annotated[dict[str, str], Hidden("values")]
SecretOptions = Annotated[dict[str, Any], Hidden("values")]
SecretCommand = Annotated[list[str], Hidden("arguments")]


class Interpolated(str):
    """Interpolated is the text of an option whose value is a reference (${...}) in the config file:
    the reference's resolved value. `written` is the reference itself, which is stored instead of
    the text.
    """

    written: str

    def __new__(cls, text: str, written: str) -> "Interpolated":
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.written
