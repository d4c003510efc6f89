"""Environment plugin of a benchmark: completions of lognormal lengths, whatever the model
generates.
"""

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

ASKED = "RFTMEGA_BENCHMARK_ASKED"  # file that logs the number of pending completions
SIGMA, LONGEST = 1.0, 16.0  # sigma and maximum of lengths, in medians


@dataclass(frozen=True)
class LongTail(EnvironmentPart):
    """One completion per prompt, of a lognormal length."""

    type: Literal["long_tail"] = "long_tail"

    median: int = 12
    """Median length of a completion in tokens."""


@implements(LongTail)
class LongTailEnvironment:
    """LongTailEnvironment requests one completion of a random length per prompt."""

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
        finally:  # also for a cancelled request
            self._tell(-1)
        return Rollout((Trajectory.of(task.token_ids, completion),))

    def _tell(self, more: int) -> None:
        self._asked += more
        with Path(os.environ[ASKED]).open("a") as file:
            file.write(f"{time.time()} {self._asked}\n")
