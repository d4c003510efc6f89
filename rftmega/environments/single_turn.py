"""SingleTurnEnvironment generates one completion per rollout."""

from collections.abc import Sequence
from typing import Any

from rftmega.config.options.environments import SingleTurn
from rftmega.config.options.parts import implements
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Trajectory


@implements(SingleTurn)
class SingleTurnEnvironment:
    """SingleTurnEnvironment returns rollouts of one trajectory: the prompt and one completion."""

    def __init__(self, options: SingleTurn = SingleTurn(), tokenizer: Any = None):  # noqa: B008
        """Accepts `options` and `tokenizer`, like all environments, and uses neither."""

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        return [Trajectory.of(task.token_ids, await model.generate(task.token_ids))]
