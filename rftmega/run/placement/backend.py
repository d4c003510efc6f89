"""Backend and Trainable are all that placement, weights and checkpoints know of how a model is built."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from rftmega.checkpoints.run_checkpoints import TrainedModel
from rftmega.config import RunConfig
from rftmega.core.interfaces import Policy, ValueModel
from rftmega.core.shards import Shard, TrainedAdapters
from rftmega.core.types import Metrics
from rftmega.model_providers.description import ModelDescription
from rftmega.runtime.device.residency import Residency

Role = Literal["critic", "reward"]


class Trainable(TrainedModel, Protocol):
    """Trainable is a model of this run, of which this process holds a part."""

    sum_of_frozen: int | None  # checksum of the reference, or of all weights of a reward model

    @property
    def path(self) -> str:
        """Returns the Hugging Face folder that it was built from."""

    @property
    def description(self) -> ModelDescription: ...

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of its forward pass."""

    @property
    def layout(self) -> str:
        """Returns the layout in words, such as "tensor 2 x data 2"."""

    @property
    def label(self) -> str:
        """Returns this process's place in the layout, in words."""

    @property
    def residency(self) -> Residency: ...

    @property
    def replica_group(self) -> Any:
        """Returns the processes that hold one whole model between them; None: all."""

    @property
    def classifier(self) -> bool:
        """Returns whether it is a value model."""

    def shards(self) -> Sequence[Shard]:
        """Returns what this process holds of the model."""

    def frozen_shards(self) -> Sequence[Shard]:
        """Returns what this process holds of the model, without what adapters add."""

    def adapters(self) -> TrainedAdapters | None:
        """Returns what this process holds of the adapters; None where all of the model learns."""

    def averaged(self) -> AbstractContextManager[None] | None:
        """Returns a context in which the model holds its average; None where none is kept."""


class TrainablePolicy(Trainable, Policy, Protocol):
    """TrainablePolicy is a Trainable that gives log-probs."""

    push_to_rollout: Callable[..., Metrics] | None  # set once there is an engine to push to


class TrainableValues(Trainable, ValueModel, Protocol):
    """TrainableValues is a Trainable that gives values."""


class Backend(Protocol):
    """Backend builds the models of a run. Every process calls it alike."""

    def policy(self, config: RunConfig) -> TrainablePolicy:
        """Builds and loads `config.model` with its optimizer.

        Raises CheckpointError where the folder's config or weights can't serve.
        """

    def value_model(self, config: RunConfig, *, role: Role) -> TrainableValues:
        """Builds `config.model` with a value head; "reward": it only scores, without optimizer."""
