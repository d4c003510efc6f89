"""MegatronActor: the policy model, in any parallel layout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rftmega.backends.megatron.adapters import Adapters
from rftmega.backends.megatron.forward import LogProbs, output_weight
from rftmega.backends.megatron.manager import MegatronModelManager
from rftmega.backends.megatron.model_runner import MegatronRunner
from rftmega.backends.megatron.trainable import MegatronModel
from rftmega.backends.runner.model_runner import MicroBatch
from rftmega.backends.runner.scoring_policy import ScoringPolicy
from rftmega.config import RunConfig
from rftmega.converters import table
from rftmega.core.types import Column, LossFn, Metrics, Rows, TokenStats
from rftmega.models.hf.lm_head_rows import HeadSource, HeldRows
from rftmega.models.hf.stacked_files import open_folder
from rftmega.models.layers import router_replay
from rftmega.runtime.device.held_weights import AveragedWeights, ReferenceWeights
from rftmega.runtime.parallel.topology import Topology

OUTPUT_WEIGHT = "output_layer.weight"  # Megatron's name


class MegatronActor(MegatronModel, ScoringPolicy):
    """MegatronActor computes log-probs and trains the policy.

    Every process calls its methods with the whole batch and gets the whole result.
    """

    def __init__(
        self,
        cfg: RunConfig,
        placement: Topology,
        role: str = "actor",
        *,
        manager: MegatronModelManager | None = None,
    ):
        """Builds the model and loads its weights. `manager`: the manager of a model that is built
        already; None: build one.

        `role`: "actor", or "reference" for a model that only scores (no optimizer). Log-probs are
        those of the sampling distribution, at the temperature `cfg.rollout.temperature`.
        """
        if role not in ("actor", "reference"):
            raise ValueError(
                f"role={role!r} is unknown. Choose actor or reference; a value model is a MegatronCritic."
            )
        super().__init__(manager or MegatronModelManager(cfg, placement), placement)
        if role == "actor":
            self.prepare_to_learn()
        self.runner = MegatronRunner(
            self.manager, TokenStats, LogProbs(self.manager.description.vocabulary)
        )
        self.records = cfg.rollout.router_replay == "trainer"
        if cfg.rollout.router_replay != "none":
            experts = self.manager.description.experts
            assert experts is not None, "validation refuses it for a dense model"
            for chunk in self.manager.model:
                router_replay.install(chunk, experts.layers)
        residency, weights = self.manager.residency, self.manager.weights
        self.reference: ReferenceWeights | Adapters | None = None
        if role == "actor" and cfg.algorithm.reads_reference and self.manager.adapters is None:
            self.sum_of_frozen = self.manager.sum_of_weights()
        if role == "actor" and cfg.algorithm.kl.coef > 0:
            # with adapters, the frozen base model is the reference: no second copy of the weights
            self.reference = self.manager.adapters or ReferenceWeights(residency, weights)
        keep_average = role == "actor" and cfg.algorithm.ema_beta > 0
        self.average = (
            AveragedWeights(residency, weights, cfg.algorithm.ema_beta) if keep_average else None
        )
        if self.average is not None:
            self.runner.after_step = self.average.update
        self.push_to_rollout: Callable[..., Metrics] | None = None

    def log_probs(
        self, rows: Rows[Column], *, temperature: float | None = None
    ) -> TokenStats[Column]:
        """Returns the log-prob and entropy of every target token (all but the first of each row) on
        the host, without gradient.

        `rows`: token sequences of prompt and completion. `temperature`: None for
        `cfg.rollout.temperature`. MoE layers replay the expert choices in `rows.routes`; without
        any, and with rollout.router_replay=trainer, the result contains the routers' own choices.
        """
        found: TokenStats[Column] = self.runner.score(
            rows, temperature=temperature, record=self.records and rows.routes is None
        )
        return found

    def reference_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        """Returns the log-prob and entropy of every target token (all but the first of each row)
        under the reference weights, whose routers choose experts themselves.

        `rows`: token sequences of prompt and completion. Raises AssertionError if no reference
        weights are kept.
        """
        assert self.reference is not None, (
            "algorithm.kl.coef is 0, so no reference weights are kept"
        )
        with self.reference.swapped_in():
            own: TokenStats[Column] = self.runner.score(replace(rows, routes=None))
        return own

    @property
    def held_rows(self) -> HeldRows | None:
        """Returns the rows of the LM head that this process holds; None if it holds no LM head."""
        chunk = self.manager.chunks[-1]
        if not chunk.post_process:
            return None
        width = len(output_weight(chunk))
        return HeldRows(self.topology.tensor_rank * width, width)

    @property
    def logits_factor(self) -> float:
        """Returns the constant by which the model multiplies its logits after the LM head."""
        return self.manager.description.scales.logits

    @property
    def head_source(self) -> HeadSource:
        """Returns where the LM head is in the model's folder.

        Raises CheckpointError if it is no Hugging Face folder.
        """
        manager, folder = self.manager, self.manager.cfg.model.path
        (head,) = [
            rule.hf[0] for rule in table(manager.hf_config) if rule.megatron == (OUTPUT_WEIGHT,)
        ]
        return HeadSource(
            open_folder(folder, manager.hf_config),
            head.name,
            (manager.description.vocabulary, manager.description.hidden),
            factor=manager.description.scales.logits,
        )

    def sync_model_to_rollout(self, version: int) -> Metrics:
        """Pushes the weights to the rollout engine; later completions are labelled with `version`.
        Raises RuntimeError if no strategy has set `push_to_rollout`.
        """
        if self.push_to_rollout is None:
            raise RuntimeError(
                "This actor has no rollout engine: a strategy sets push_to_rollout once it has built one."
            )
        return self.push_to_rollout(version=version)

    def get_forward_step_func(
        self, loss_fn: LossFn | None = None
    ) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns Megatron's `forward_step_func(data_iterator, model)`, which trains with
        `loss_fn`, or scores if it is None.
        The iterator yields (Rows, Experience on the device); the Experience is None to score.
        """

        def step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
            rows, experience = next(data_iterator)
            batch = MicroBatch(rows, self.runner.temperature, experience, loss_fn)
            return self.runner.forward_step(iter([batch]), model)

        return step
