"""FSDPActor: the policy model with sharded parameters."""

from collections.abc import Callable

from torch import Tensor

from rftmega.backends.fsdp.adapters import ShardedAdapters
from rftmega.backends.fsdp.manager import FSDPModelManager
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.module import LogProbHead
from rftmega.backends.fsdp.runner import FSDPRunner
from rftmega.backends.fsdp.trainable import FSDPModel
from rftmega.backends.runner.scoring_policy import ScoringPolicy
from rftmega.config import RunConfig
from rftmega.core.errors import CheckpointError
from rftmega.core.types import Column, Metrics, Rows, TokenStats
from rftmega.models.hf.lm_head_rows import HeadSource, HeldRows
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.runtime.device.held_weights import AveragedWeights, ReferenceWeights


class FSDPActor(FSDPModel, ScoringPolicy):
    """FSDPActor computes log-probs and trains the policy.

    Every process calls its methods with the whole batch and gets the whole result.
    """

    def __init__(
        self,
        cfg: RunConfig,
        placement: ShardingMesh,
        *,
        manager: FSDPModelManager | None = None,
        learns: bool = True,
    ):
        """Builds the model and its optimizer and loads the weights.

        `manager`: the manager of a model that is built already; None: build one. `learns`: whether
        the model is trained; otherwise the model only scores, without an optimizer. Log-probs are
        those of the sampling distribution, at the temperature `cfg.rollout.temperature`.
        """
        super().__init__(manager or FSDPModelManager(cfg, placement), placement)
        if learns:
            self.manager.setup_model_and_optimizer()
        else:
            self.sum_of_frozen = self.manager.sum_of_weights()
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
    def held_rows(self) -> HeldRows | None:
        """Returns the rows of the LM head that this process computes with."""
        if (shard := self._head.shard) is not None:
            return HeldRows(shard.first, shard.real)
        return HeldRows(0, self.description.vocabulary)

    @property
    def _head(self) -> LogProbHead:
        head = self.manager.network.head
        assert isinstance(head, LogProbHead), "a policy computes log-probs"
        return head

    @property
    def logits_factor(self) -> float:
        """Returns the constant by which the model multiplies its logits after LM head and soft cap."""
        return self._head.after

    @property
    def head_source(self) -> HeadSource:
        """Returns where the LM head is in the model's folder.

        Raises CheckpointError if the folder stores it in another form.
        """
        head, folder = self._head, self.path
        bias = head.linear.bias
        return HeadSource(
            open_quantised(folder, self.manager.hf_config),
            self._name_of(head.linear.weight),
            (self.description.vocabulary, self.description.hidden),
            None if bias is None else self._name_of(bias),
            head.cap,
            head.after,
        )

    def _name_of(self, parameter: Tensor) -> str:
        """Returns the name of a parameter in the model's folder."""
        (held,) = [each for each in self.manager.weights_held if each.parameter is parameter]
        if len(held.names) != 1:
            raise CheckpointError(
                f"{self.path}: its LM head is stored as {', '.join(held.names)}, and a teacher's must be one tensor. Take "
                "algorithm.teachers[].vocabulary=top_k."
            )
        return held.names[0]
