"""Runs one rollout of an environment, and runs it again after an infrastructure fault."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rftmega.core.errors import InfrastructureFault, described
from rftmega.core.interfaces import Environment, Model
from rftmega.core.types import Prompt, Rollout, Trajectory

log = logging.getLogger(__name__)


class RolloutAttempts:
    """RolloutAttempts runs an environment's rollouts, repeats them after infrastructure faults, and
    refuses results that can't be trained on.
    """

    def __init__(self, environment: Environment, *, row_tokens: int, repeats: int):
        """Stores the environment. `row_tokens`: the engine's limit on prompt and completion
        together. `repeats`: how often a rollout is run again after an InfrastructureFault, before
        it is marked as lost.
        """
        self.environment, self.row_tokens, self.repeats = environment, row_tokens, repeats

    async def run(self, task: Prompt, new_model: Callable[[], Model]) -> Rollout:
        """Runs a rollout of the prompt `task` and returns it; if all attempts failed with an
        InfrastructureFault, returns a rollout that is marked as lost. `new_model` creates the model
        that the environment calls, a new one per attempt, so that each attempt has the same seeds.

        Raises the environment's other exceptions, and ValueError for a trajectory that can't be
        trained on.
        """
        repeats = 0
        while True:
            try:
                rollout = self._checked(await self.environment.run(task, new_model()), task)
            except InfrastructureFault as fault:
                if repeats == self.repeats:
                    log.warning("a rollout of prompt %d is left out: %s", task.index, fault)
                    return Rollout((Trajectory.of(task.token_ids),), lost=str(fault))
                repeats += 1
                continue
            if repeats:
                return replace(rollout, measures=rollout.measures | {"repeats": float(repeats)})
            return rollout

    def failure(self, error: BaseException, task: Prompt) -> str:
        """Returns the message for the user if the environment raised `error`, no
        InfrastructureFault, in a rollout of `task`.
        """
        return (
            f"The environment {type(self.environment).__name__} failed with {described(error, call=True)} in a rollout of prompt "
            f"{task.index}. Mend it, or let it catch what a tool may raise."
        )

    def _checked(self, given: Any, task: Prompt) -> Rollout:
        rollout = given if isinstance(given, Rollout) else Rollout(tuple(given))
        if not rollout.trajectories:
            raise ValueError("it returned no trajectory")
        if len(rollout.trajectories) > 1 and task.images:
            raise ValueError(
                "it returned several trajectories of a prompt with images, which have their places in one: return one"
            )
        for one in rollout.trajectories:
            self._refuse_unlearnable(one)
        return rollout

    def _refuse_unlearnable(self, one: Any) -> None:
        if not isinstance(one, Trajectory):
            raise ValueError(f"it returned {type(one).__name__} in place of a Trajectory")
        if len(one) < 2 or one.loss_mask[0]:
            raise ValueError("its trajectory begins with no prompt, or has nothing behind it")
        if len(one) > self.row_tokens:
            raise ValueError(
                f"its trajectory has {len(one)} tokens: rollout.max_prompt_tokens + rollout.max_response_tokens is "
                f"{self.row_tokens}. Leave out what stands behind the last answer"
            )
