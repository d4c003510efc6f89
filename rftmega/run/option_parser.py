"""The argument parser of programs that take a CONFIG and options of it (option=value)."""

import argparse
from typing import NoReturn

from rftmega.config.tree import options
from rftmega.config.unknown_options import unknown

UNRECOGNIZED = "unrecognized arguments: "


class OptionParser(argparse.ArgumentParser):
    """OptionParser is an ArgumentParser that explains options of the config which are written with
    dashes, as in other frameworks: --trainer.steps=5, --num_generations 8.
    """

    def error(self, message: str) -> NoReturn:
        """Writes the error to stderr and exits with code 2."""
        words = message.removeprefix(UNRECOGNIZED).split()
        dashed = [word for word in words if word.startswith("--")]
        if message.startswith(UNRECOGNIZED) and dashed:
            self.exit(2, "".join(f"error: {_explained(word)}\n" for word in dashed))
        super().error(message)


def _explained(word: str) -> str:
    """Returns the error message for an option of the config that is written with dashes."""
    name, equals, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    known = list(options())
    if name in known:
        return f"{word}: options of the config have no dashes. Write {name}={value if equals else 'VALUE'}."
    return f"{word}: {unknown(name, known, value or None)}"
