"""Wraps the policy and value models of a run such that each is moved to the device before use."""

from typing import Any

from rftmega.core.types import (
    Auxiliary,
    Column,
    Experience,
    LossFn,
    Metrics,
    Rows,
    TokenStats,
    TokenValues,
    Told,
)
from rftmega.run.placement.backend import TrainablePolicy, TrainableValues
from rftmega.run.placement.phases import DevicePhases


class ColocatedPolicy:
    """ColocatedPolicy wraps the policy `actor`: before each computation it moves the policy's state
    to the device.
    """

    def __init__(self, actor: TrainablePolicy, phases: DevicePhases):
        self.actor = actor
        self.phases = phases

    def log_probs(
        self, rows: Rows[Column], *, temperature: float | None = None
    ) -> TokenStats[Column]:
        self.phases.score()
        return self.actor.log_probs(rows, temperature=temperature)

    def forward(self, rows: Rows) -> TokenStats:
        """Returns the log-probs and entropies of this process's own `rows` [B, T], with gradient;
        see `ModelRunner.forward`.
        """
        self.phases.update()
        found: TokenStats = self.actor.forward(rows)
        return found

    def reference_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        self.phases.score()
        return self.actor.reference_log_probs(rows)

    def step(
        self,
        experience: Experience[Any],
        loss_fn: LossFn,
        *,
        group_size: int = 1,
        auxiliary: Auxiliary | None = None,
        scored: Told | None = None,
    ) -> Metrics:
        self.phases.update()
        return self.actor.step(
            experience, loss_fn, group_size=group_size, auxiliary=auxiliary, scored=scored
        )


class ColocatedValues:
    """ColocatedValues wraps a value model: before each computation it moves the model's state to
    the device. `name`: the model's name in `phases`.
    """

    def __init__(self, model: TrainableValues, phases: DevicePhases, name: str):
        self.model, self.phases, self.name = model, phases, name

    def values(self, rows: Rows[Column]) -> Column:
        self.phases.score(self.name)
        return self.model.values(rows)

    def forward(self, rows: Rows) -> TokenValues:
        """Returns the values of this process's own `rows` [B, T], with gradient; see
        `ModelRunner.forward`.
        """
        self.phases.update(self.name)
        found: TokenValues = self.model.forward(rows)
        return found

    def step(self, experience: Experience[Any], loss_fn: LossFn, *, group_size: int = 1) -> Metrics:
        self.phases.update(self.name)
        return self.model.step(experience, loss_fn, group_size=group_size)
