"""Markers of options that hold secrets, and strings that know the variable they came from."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Hidden:
    """Hidden marks an option that is not stored, published or quoted: with `all` nothing of it is,
    with `values` only the keys of a mapping are, with `arguments` only a command's program and the
    names of its --long options.
    """

    part: Literal["all", "values", "arguments"]


SecretText = Annotated[str, Hidden("all")]
SecretValues = Annotated[dict[str, str], Hidden("values")]
SecretOptions = Annotated[dict[str, Any], Hidden("values")]
SecretCommand = Annotated[list[str], Hidden("arguments")]


class Interpolated(str):
    """Interpolated is the text of an option that a config file writes with ${...}: it is used like
    any other text, and stored as written.
    """

    written: str

    def __new__(cls, text: str, written: str) -> "Interpolated":
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.written
