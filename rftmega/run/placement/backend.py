"""Backend and Trainable: the interfaces through which placement, weight sync and checkpoints use a
model, whichever framework built it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from rftmega.checkpoints.run_checkpoints import TrainedModel
from rftmega.config import RunConfig
from rftmega.core.interfaces import Policy, ValueModel
from rftmega.core.shards import Shard, TrainedAdapters
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import Column, Metrics, Rows, TokenStats
from rftmega.model_providers.description import ModelDescription
from rftmega.models.hf.lm_head_rows import HeadSource, HeldRows
from rftmega.models.kernels.teacher_terms import TeacherTerm
from rftmega.runtime.device.residency import Residency

Role = Literal["critic", "reward"]


class Trainable(TrainedModel, Protocol):
    """Trainable is the interface of a model of this run (policy or value model), of which this
    process holds a shard.
    """

    sum_of_frozen: int | None  # checksum of the reference, or of all weights of a reward model

    @property
    def path(self) -> str:
        """Returns the path of the Hugging Face folder that the model was built from."""

    @property
    def description(self) -> ModelDescription: ...

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the model's forward pass."""

    @property
    def layout(self) -> str:
        """Returns a text that describes the model's parallel layout, such as "tensor 2
        x data 2".
        """

    @property
    def label(self) -> str:
        """Returns a text that describes this process's position in the layout."""

    @property
    def residency(self) -> Residency: ...

    @property
    def replica_group(self) -> Any:
        """Returns the group of the processes that together hold one replica of the model; None means
        all processes.
        """

    @property
    def forward(self) -> Callable[..., Any]:
        """Returns a method that maps rows to statistics with gradient (`ModelRunner.forward`)."""

    @property
    def why_no_backward(self) -> str:
        """Returns why `forward` can't run in this layout; "" if it can."""

    @property
    def classifier(self) -> bool:
        """Returns whether the model is a value model, which is exported as a classifier."""

    def shards(self) -> Sequence[Shard]:
        """Returns this process's shards of the model."""

    def frozen_shards(self) -> Sequence[Shard]:
        """Returns this process's shards of the model's weights without the adapters' contribution."""

    def adapters(self) -> TrainedAdapters | None:
        """Returns this process's shards of the adapters; None if all weights are trained."""

    def averaged(self) -> AbstractContextManager[None] | None:
        """Returns a context in which the model holds its moving average (EMA); None without an
        average.
        """


class TrainablePolicy(Trainable, Policy, Protocol):
    """TrainablePolicy is a Trainable that computes log-probs."""

    push_to_rollout: Callable[..., Metrics] | None  # set once an engine exists

    @property
    def starting_sum(self) -> int:
        """Returns the checksum of the weights that `starting_log_probs` scores with."""

    def starting_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        """Returns the log-prob of every target of `rows` at temperature 1, under the base model if
        the policy has adapters, otherwise under the current weights. Without gradient.
        """

    def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
        """Returns a teacher's numbers, see `core.interfaces.TeacherScorer`."""

    def learn_from(self, terms: Sequence[TeacherTerm]) -> None:
        """Sets the distillation terms of the loss, one per teacher of `Experience.teachers`."""

    @property
    def held_rows(self) -> HeldRows | None:
        """Returns the rows of the LM head that this process holds; None if it holds none."""

    @property
    def head_source(self) -> HeadSource:
        """Returns where the LM head is in the model's folder."""

    @property
    def logits_factor(self) -> float:
        """Returns the constant by which the model multiplies its logits after LM head and soft cap."""


class TrainableValues(Trainable, ValueModel, Protocol):
    """TrainableValues is a Trainable that computes values."""


class Backend(Protocol):
    """Backend builds the models of a run. Every process makes the same calls."""

    def policy(self, config: RunConfig) -> TrainablePolicy:
        """Builds and loads `config.model` with its optimizer.

        Raises CheckpointError if the folder's config or weights can't be used.
        """

    def teacher(self, config: RunConfig) -> TrainablePolicy:
        """Builds and loads `config.model` in its own layout, without an optimizer.

        Raises CheckpointError if the folder's config or weights can't be used.
        """

    def value_model(self, config: RunConfig, *, role: Role) -> TrainableValues:
        """Builds and loads `config.model` with a value head. With `role` "critic" it gets an
        optimizer; with "reward" (a reward model) it only scores, and has none.
        """
