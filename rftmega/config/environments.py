"""Options of the environment in which a task is done."""

from dataclasses import dataclass
from typing import Literal

from rftmega.config.parts import EnvironmentPart


@dataclass(frozen=True)
class SingleTurn(EnvironmentPart):
    """The prompt, and one answer to it."""

    type: Literal["single_turn"] = "single_turn"
