"""SupervisedStrategy trains one model on given completions or preferences, without an engine."""

from functools import cached_property
from pathlib import Path
from typing import cast

from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints, of_run
from rftmega.config import RunConfig
from rftmega.core.types import Experience, LossFn, Metrics
from rftmega.run.placement.backend import Backend, TrainablePolicy, TrainableValues
from rftmega.run.placement.export import export, rehearse
from rftmega.run.placement.phase_memory import Memory, predicted
from rftmega.run.planning.models import POLICY
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.seeds import set_seed


class SupervisedStrategy:
    """SupervisedStrategy trains the policy (algorithm.task=sft and preference) or a value model
    (reward_model).
    """

    def __init__(self, config: RunConfig, world: World, backend: Backend):
        set_seed(config.trainer.seed)
        self.config = config
        self.model: TrainablePolicy | TrainableValues
        if config.algorithm.task == "reward_model":
            self.model = backend.value_model(config, role="critic")
        else:
            self.model = backend.policy(config)
        rehearse(self.model, config)
        self.label = self.model.label
        self._memory = Memory({POLICY: self.model.residency}, predicted(config, world))

    @property
    def policy(self) -> TrainablePolicy:
        """Returns the model of a task that trains a policy."""
        return cast(TrainablePolicy, self.model)

    def step(self, experience: Experience, loss_fn: LossFn, *, group_size: int = 1) -> Metrics:
        """Takes one optimizer step of the model on the rows of `experience`. Returns the metrics of
        the step and of memory.

        Every `group_size` consecutive rows are passed to `loss_fn` together.
        """
        self._memory.begin("update")
        metrics = self.model.step(experience, loss_fn, group_size=group_size)
        self._memory.end()
        return metrics | self._memory.take()

    @cached_property
    def checkpoints(self) -> TrainingCheckpoints:
        """Returns the TrainingCheckpoints, which save and load the model as configured by
        checkpoint.*.
        """
        return of_run(self.config, {self.config.algorithm.task: self.model}, self.export)

    def export(self, folder: str | Path) -> None:
        """Writes the model as a Hugging Face folder; every process calls it."""
        export(self.model, folder, self.config.trainer)
