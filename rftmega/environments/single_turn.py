"""SingleTurnEnvironment generates one completion per rollout."""

from collections.abc import Sequence
from typing import Any

from rftmega.config.options.environments import SingleTurn
from rftmega.config.options.parts import implements
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Trajectory


@implements(SingleTurn)
class SingleTurnEnvironment:
    """SingleTurnEnvironment returns one trajectory of the prompt and one completion."""

    def __init__(self, options: SingleTurn = SingleTurn(), tokenizer: Any = None):  # noqa: B008
        """Accepts the arguments of all environments; neither is used."""

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        return [Trajectory.of(task.token_ids, await model.generate(task.token_ids))]
