"""FSDPActor: the policy model with sharded parameters."""

from collections.abc import Callable
from contextlib import nullcontext

from rftmega.backends.fsdp.adapters import ShardedAdapters
from rftmega.backends.fsdp.manager import FSDPModelManager
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.runner import FSDPRunner
from rftmega.backends.fsdp.trainable import FSDPModel
from rftmega.config import RunConfig
from rftmega.core.types import Column, Metrics, Rows, TokenStats
from rftmega.runtime.device.held_weights import AveragedWeights, ReferenceWeights


class FSDPActor(FSDPModel):
    """FSDPActor computes log-probs and trains the policy.

    Every process calls its methods with the whole batch and gets the whole result.
    """

    def __init__(
        self, cfg: RunConfig, placement: ShardingMesh, *, manager: FSDPModelManager | None = None
    ):
        """Builds the model and its optimizer and loads the weights.

        `manager`: has built the model already; None: a new one. Log-probs are those of the sampling
        distribution, at the temperature `cfg.rollout.temperature`.
        """
        super().__init__(manager or FSDPModelManager(cfg, placement), placement)
        self.manager.setup_model_and_optimizer()
        self.runner = FSDPRunner(self.manager, TokenStats)
        residency, weights = self.manager.residency, self.manager.weights
        self.reference: ReferenceWeights | ShardedAdapters | None = None
        if cfg.algorithm.reads_reference and self.manager.adapters is None:
            self.sum_of_frozen = self.manager.sum_of_weights()
        if cfg.algorithm.kl.coef > 0:
            # with adapters, the frozen base model is the reference: no second copy of the weights
            self.reference = self.manager.adapters or ReferenceWeights(residency, weights)
        if cfg.algorithm.ema_beta > 0:
            self.average = AveragedWeights(residency, weights, cfg.algorithm.ema_beta)
            self.runner.after_step = self.average.update
        self.push_to_rollout: Callable[..., Metrics] | None = None

    def log_probs(
        self, rows: Rows[Column], *, temperature: float | None = None
    ) -> TokenStats[Column]:
        """Returns the log-prob and entropy of every target token (all but the first of each row) on
        the host, without gradient.

        `rows`: token sequences of prompt and completion. `temperature`: None for
        `cfg.rollout.temperature`.
        """
        found: TokenStats[Column] = self.runner.score(rows, temperature=temperature)
        return found

    def reference_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        """Returns the log-prob and entropy of every target token (all but the first of each row)
        under the reference weights.

        `rows`: token sequences of prompt and completion. Raises AssertionError if no reference
        weights are kept.
        """
        assert self.reference is not None, (
            "algorithm.kl.coef is 0, so no reference weights are kept"
        )
        with self.reference.swapped_in():
            return self.log_probs(rows)

    @property
    def starting_sum(self) -> int:
        """Returns the checksum of the weights that `starting_log_probs` scores with."""
        found = self.sum_of_frozen if self.manager.adapters is None else self.manager.sum_of_base
        assert found is not None, "this run reads no log-probs of the reference"
        return found

    def starting_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        """Returns the log-prob and entropy of every target token at temperature 1, under the base
        model if the policy has adapters, otherwise under the current weights: before training,
        those of the starting policy.
        """
        adapters = self.manager.adapters
        with nullcontext() if adapters is None else adapters.swapped_in():
            return self.log_probs(rows, temperature=1.0)
