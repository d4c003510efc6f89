"""SingleTurnEnvironment asks the model once."""

from collections.abc import Sequence
from typing import Any

from rftmega.config.options.environments import SingleTurn
from rftmega.config.options.parts import implements
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Trajectory


@implements(SingleTurn)
class SingleTurnEnvironment:
    """SingleTurnEnvironment makes one trajectory of the prompt and one answer."""

    def __init__(self, options: SingleTurn = SingleTurn(), tokenizer: Any = None):  # noqa: B008
        """Neither is needed here; every environment gets both."""

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        return [Trajectory.of(task.token_ids, await model.generate(task.token_ids))]
