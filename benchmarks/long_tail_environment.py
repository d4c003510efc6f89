"""Answers of given, lognormal lengths, whatever the model says: a plugin of a benchmark."""

import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rftmega.config.options.parts import EnvironmentPart, implements
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Rollout, Trajectory

ASKED = "RFTMEGA_BENCHMARK_ASKED"  # the file that is told how many answers are asked for, and when
SIGMA, LONGEST = 1.0, 16.0  # of lengths in medians; they are cut off at the second


@dataclass(frozen=True)
class LongTail(EnvironmentPart):
    """One answer a prompt, as long as a lognormal number says."""

    type: Literal["long_tail"] = "long_tail"

    median: int = 12
    """Tokens of the median answer."""


@implements(LongTail)
class LongTailEnvironment:
    """LongTailEnvironment asks for one answer of so many tokens."""

    def __init__(self, options: LongTail, tokenizer: Any):
        self.options = options
        self._drawn = random.Random(0)
        self._asked = 0

    async def run(self, task: Prompt, model: Model) -> Rollout:
        medians = min(math.exp(self._drawn.gauss(0.0, SIGMA)), LONGEST)
        tokens = max(1, round(self.options.median * medians))
        self._tell(1)
        try:
            completion = await model.generate(task.token_ids, max_tokens=tokens)
        finally:  # an answer that is taken back is not asked for either
            self._tell(-1)
        return Rollout((Trajectory.of(task.token_ids, completion),))

    def _tell(self, more: int) -> None:
        self._asked += more
        with Path(os.environ[ASKED]).open("a") as file:
            file.write(f"{time.time()} {self._asked}\n")
