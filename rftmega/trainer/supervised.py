"""Supervised training on given rows (responses or preference pairs), without rollouts or rewards."""

from collections.abc import Callable
from typing import Protocol

import torch

from rftmega.core.types import Experience, LossFn, Metrics, Rows
from rftmega.trainer.experience import given
from rftmega.trainer.loop import Trainer
from rftmega.trainer.optimizer_steps import Schedule, take_steps


class Learns(Protocol):
    """Learns is a model with an optimizer step: a policy or a value model."""

    def step(self, experience: Experience, loss_fn: LossFn, *, group_size: int = 1) -> Metrics: ...


class SupervisedTrainer(Trainer):
    """SupervisedTrainer trains a model on one batch of given rows per step."""

    def __init__(
        self,
        *,
        model: Learns,
        loss_fn: LossFn,
        group_size: int = 1,
        schedule: Schedule | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        """`group_size`: number of consecutive rows that are passed to the loss together, 2 for
        pairs.

        `stop`: see Trainer.
        """
        super().__init__(stop=stop)
        self.model, self.loss_fn, self.group_size = model, loss_fn, group_size
        self.schedule = schedule or Schedule()

    def train_step(self, batch: Rows) -> Metrics:
        experience = given(batch)
        with self.phase("update"):
            units = torch.full((len(experience) // self.group_size,), self.group_size)
            rows = self.schedule.mini_batches(units, self.step)
            metrics = take_steps(
                self.model, experience, self.loss_fn, rows, group_size=self.group_size
            )
        self.step += 1
        return metrics
