"""A model over rows: micro-batches, pipeline schedule, optimizer steps, results back in the
caller's order.

Megatron's contract with `calculate_per_token_loss`: the loss function gives (local sum, local
integer count, anything); gradients are divided once, by the count of all micro-batches and ranks.
So this file moves rows and sums; what is learnt is the LossFn's business.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model_providers.tower import AudioTower
from rftmega.device.spans import recorder
from rftmega.flops import BACKWARD, ear_flops, forward_flops, tower_flops
from rftmega.media.fed import FedPictures, fed_pictures
from rftmega.media.fed_waveforms import FedWaveforms, fed_waveforms
from rftmega.media.placed import PlacedPicture, RowPictures
from rftmega.megatron.auxiliary import beside
from rftmega.megatron.forward import HiddenProcessor, custom_forward, packed_length, unwrap
from rftmega.megatron.manager import MegatronModelManager
from rftmega.parallel import host_memory
from rftmega.parallel.micro_batches import fewest_micro_batches, plan_micro_batches
from rftmega.parallel.watchdog import mark
from rftmega.ragged import Ragged
from rftmega.types import (
    COUNT,
    Auxiliary,
    Experience,
    LossFn,
    Metrics,
    Rows,
    TokenLoss,
    TokenMetric,
    Told,
)

COUNTED = ("tokens", "slots", "flops", "bubble", "ideal")  # by the recorder, in every pass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """MicroBatch holds rows to compute and what to learn from them; without `experience` they are
    only scored.
    """

    rows: Rows
    temperature: float  # of the distribution that is scored
    experience: Experience | None = None  # on the device
    loss_fn: LossFn | None = None


class ModelRunner:
    """Scoring passes and optimizer steps of one model; every process calls them with the whole
    batch.
    """

    def __init__(
        self, manager: MegatronModelManager, stats: Any, processor: HiddenProcessor | None
    ):
        """`stats` (TokenStats or TokenValues) is what a forward gives; `processor` makes it, or
        None for a value model.
        """
        self.manager = manager
        self.topology = manager.topology
        self.stats = stats
        self.names: list[str] = list(stats.__dataclass_fields__)
        self.processor = processor
        self.cfg = manager.cfg
        self.temperature = self.cfg.rollout.temperature
        # called once an optimizer step that was taken
        self.after_step: Callable[[], None] = lambda: None

    @torch.no_grad()
    def score(self, rows: Rows[Any], *, temperature: float | None = None) -> Any:
        """Returns `stats` of every target on the host, in columns like those of `rows`; no gradient.

        `temperature`: None for the rollout's.
        """
        self.manager.finish_param_sync()
        chosen = self.temperature if temperature is None else temperature
        for chunk in self.manager.model:
            chunk.eval()
        indices = self._micro_batches(rows, passes=1)
        batches = [MicroBatch(rows.select(index).padded(), chosen) for index in indices]
        return self._gathered(rows, indices, self._run(batches, forward_only=True))

    def _gathered(self, rows: Rows[Any], indices: Sequence[Tensor], found: Sequence[Any]) -> Any:
        """Gathers statistics of all rows, one copy a host, from those of this process's
        micro-batches.
        """
        own = []
        if self.topology.speaks:
            for index, stats in zip(indices, found, strict=False):  # an auxiliary's follow
                own.append((index, [getattr(stats, name) for name in self.names]))
        targets = (rows.lengths - 1).clamp(min=0)
        columns = host_memory.current().of_rows(targets, len(self.names), own)
        if isinstance(rows.tokens, Ragged):
            return self.stats(*columns)
        return self.stats(*[column.padded(width=rows.tokens.shape[1] - 1) for column in columns])

    def step(
        self,
        experience: Experience[Any],
        loss_fn: LossFn,
        *,
        group_size: int = 1,
        auxiliary: Auxiliary | None = None,
        scored: Told | None = None,
    ) -> Metrics:
        """Takes one optimizer step on the rows of `experience` and of `auxiliary`; see
        `interfaces.Policy.step`.

        Each `group_size` consecutive rows come before `loss_fn` together. A step with non-finite
        gradients is skipped on all processes alike.
        """
        before = {name: recorder.counted(name) for name in COUNTED}
        learning_rate = self.manager.learning_rate
        for chunk in self.manager.model:
            chunk.train()
        self.manager.zero_grad()
        indices = self._micro_batches(experience, group_size, passes=1 + BACKWARD)
        batches = self._to_learn(experience, indices, loss_fn, self.temperature)
        losses = [(loss_fn, experience)]
        if auxiliary is not None:
            second = beside(loss_fn, experience, auxiliary, self.stats)
            beside_indices = self._micro_batches(auxiliary.experience, passes=1 + BACKWARD)
            batches += self._to_learn(auxiliary.experience, beside_indices, second, temperature=1.0)
            losses.append((second, auxiliary.experience))
        found = self._run(batches, forward_only=False)
        if scored is not None:
            scored(self._gathered(experience.rows, indices, [stats for _, stats in found]))
        metrics = self._mean([sums for sums, _ in found], losses)
        taken, grad_norm = self.manager.optimizer_step()
        if taken:
            self.after_step()
        metrics |= {"grad_norm": grad_norm, "learning_rate": learning_rate}
        metrics |= {"optimizer_steps": float(taken), "skipped_steps": float(not taken)}
        return metrics | {COUNT + name: recorder.counted(name) - before[name] for name in COUNTED}

    def _to_learn(
        self,
        experience: Experience[Any],
        indices: Sequence[Tensor],
        loss_fn: LossFn,
        temperature: float,
    ) -> list[MicroBatch]:
        parts = [experience.select(index).padded() for index in indices]
        return [
            MicroBatch(part.rows, temperature, part.to(self.manager.where), loss_fn)
            for part in parts
        ]

    def _micro_batches(
        self, batch: Rows[Any] | Experience[Any], group_size: int = 1, *, passes: int
    ) -> list[Tensor]:
        """Returns this process's rows of each; what they cost, over all processes, is counted as so
        many `passes` forward.
        """
        lengths, pictures = batch.lengths, batch.pictures
        plan = plan_micro_batches(
            lengths.tolist(),
            data_parallel=self.topology.data,
            token_cap=self.cfg.trainer.max_tokens_per_micro_batch,
            attention_cap=self.cfg.trainer.max_attention_per_micro_batch or None,
            attention_weight=self.cfg.trainer.attention_weight,
            # The interleaved schedule hands micro-batches round the stages in groups of as many as
            # there are stages.
            multiple_of=self.topology.pipeline if len(self.manager.model) > 1 else 1,
            at_least=fewest_micro_batches(self.topology.pipeline),
            group_size=group_size,
            patches=None if pictures is None else pictures.patches,
            patch_cap=self.cfg.trainer.max_patches_per_micro_batch or None,
            patch_weight=self.cfg.trainer.patch_weight,
        )
        self._count(
            [[[int(lengths[row]) - 1 for row in rows] for rows in batches] for batches in plan],
            passes,
        )
        if pictures is not None:
            self._count_pictures([pictures.select(rows) for own in plan for rows in own], passes)
        return [torch.tensor(rows, dtype=torch.int64) for rows in plan[self.topology.data_rank]]

    def _count(self, fed: Sequence[Sequence[Sequence[int]]], passes: int) -> None:
        """Counts a pass. `fed`: tokens of each row, by data-parallel rank and micro-batch."""
        rows = [tokens for batches in fed for batch in batches for tokens in batch]
        recorder.count("tokens", sum(rows))
        sequence = self.manager.config.sequence_parallel
        multiples = {
            "tensor_multiple": self.topology.tensor if sequence else 1,
            "context": self.topology.context,
        }
        recorder.count(
            "slots", sum(packed_length(batch, **multiples) for batches in fed for batch in batches)
        )
        recorder.count(
            "flops",
            passes
            * forward_flops(self.manager.description, rows, value_head=self.processor is None),
        )

    def _count_pictures(self, fed: Sequence[RowPictures], passes: int) -> None:
        """Counts the tower's part of a pass. `fed`: the pictures of each micro-batch, in which a
        picture of several rows is one.
        """
        tower = self.manager.description.tower
        assert tower is not None, "a model without a tower has no pictures"
        media = [each for batch in fed for each in batch.distinct.values()]
        if isinstance(tower, AudioTower):
            flops = len(media) * ear_flops(tower, self.manager.description.hidden)
        else:
            grids = [each.grid for each in media if isinstance(each, PlacedPicture)]
            flops = tower_flops(tower, grids)
        learns = not self.cfg.model.freeze_vision
        recorder.count("flops", (passes if learns else 1) * flops)

    def _run(self, batches: Sequence[MicroBatch], *, forward_only: bool) -> list[Any]:
        """Returns sums to be collected, or statistics, of each micro-batch on the last stage, [] on
        the others.
        """
        # Narayanan et al. (arXiv:2104.04473, section 2.2): (p - 1) / (v m) of the ideal time, here
        # as two sums.
        recorder.count("bubble", self.topology.pipeline - 1)
        recorder.count("ideal", len(batches) * len(self.manager.model))
        if self.manager.description.tower is not None:
            self.manager.read_ahead(batch.rows.pictures for batch in batches)
        return self.manager.run_schedule(self.forward_step, batches, forward_only=forward_only)

    def forward_step(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        """Computes one micro-batch in one chunk, for Megatron's schedule.

        Returns (output, its function on the last stage).
        """
        mark()
        batch = next(batches)
        rows, finish = (
            batch.rows,
            self._stats if batch.loss_fn is None else partial(self._loss, batch.loss_fn),
        )
        output = custom_forward(
            model,
            rows.tokens[:, :-1],
            # The last token of a row predicts nothing here, so it is left out.
            torch.arange(rows.tokens.shape[1] - 1) < rows.lengths[:, None] - 1,
            None,
            self.manager.config.sequence_parallel,
            value_model=self.processor is None,
            logits_processor=self.processor,
            logits_processor_args={"targets": rows.tokens[:, 1:]} if self.processor else None,
            temperature=batch.temperature,
            max_batch_seqlen=None,  # the plan has a cap of its own
            pictures=self._pictures(rows, model),
        )
        # the schedule wants to see a tensor; all of them go to `finish`
        if isinstance(output, dict):
            return next(iter(output.values())), partial(finish, batch.experience, output)
        return output, partial(finish, batch.experience, output)

    def _pictures(self, rows: Rows, model: Any) -> FedPictures | FedWaveforms | None:
        """Returns what the pictures or waveforms of the rows feed the chunk with; None for a model
        without a tower.
        """
        tower = self.manager.description.tower
        if tower is None:
            return None
        size, width = rows.tokens.shape
        feeds = unwrap(model).pre_process
        if isinstance(tower, AudioTower):
            frames = self.manager.frames if feeds else None
            return fed_waveforms(rows.pictures, size, width - 1, load=frames)
        load = self.manager.pixels if feeds else None
        return fed_pictures(rows.pictures, size, width - 1, merge=tower.merge, load=load)

    def _stats(
        self,
        experience: Experience | None,
        output: Any,
        shown: Any = None,
        non_loss_data: bool = True,
    ) -> Any:
        return self.stats(output) if self.processor is None else self.stats(**output)

    def _loss(
        self, loss_fn: LossFn, experience: Experience, output: Any, shown: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Megatron's three: local sum with its graph, integer count, and what is collected: sums
        and statistics.
        """
        stats = self._stats(None, output)
        seen = self.stats(*(getattr(stats, name).detach() for name in self.names))
        # nothing was learnt since the rollout
        if experience.old_logp is None and self.processor is not None:
            experience = replace(experience, old_logp=seen.logp)
        loss = loss_fn(stats, experience)
        total = (loss.value * loss.weight).sum()
        # Context-parallel processes all have the whole rows, and their gradients add up: one of
        # them counts.
        counted = loss.count if self.topology.context_rank == 0 else torch.zeros_like(loss.count)
        return total, counted.int(), (sums_of(loss), seen)

    def _mean(
        self,
        micro_sums: Sequence[dict[str, Tensor]],
        losses: Sequence[tuple[LossFn, Experience[Any]]],
    ) -> Metrics:
        """Returns the sums of all micro-batches and ranks, divided by the count of all; one
        collective.
        """
        # Stages that never see the loss learn its metrics' names from a batch of no rows.
        names = list(
            dict.fromkeys(
                name for loss_fn, experience in losses for name in self._names(loss_fn, experience)
            )
        )
        totals = torch.zeros(len(names), 2, dtype=torch.float64, device=self.manager.where)
        for sums in micro_sums:
            totals += torch.stack(
                [sums[name] if name in sums else totals.new_zeros(2) for name in names]
            )
        total = dict(zip(names, self.topology.sum_of_speakers(totals).tolist(), strict=True))
        return {name: value / max(count, 1) for name, (value, count) in total.items()} | {
            "count": total["loss"][1]
        }

    def _names(self, loss_fn: LossFn, experience: Experience[Any]) -> list[str]:
        nothing = experience.select(torch.zeros(0, dtype=torch.int64)).padded()
        empty = nothing.advantage
        return list(
            sums_of(
                loss_fn(self.stats(*[empty] * len(self.names)), replace(nothing, old_logp=empty))
            )
        )


def sums_of(loss: TokenLoss) -> dict[str, Tensor]:
    """Returns name -> [2]: the sum and the count of every metric and of the loss, which add up over
    micro-batches and ranks.
    """
    whole = TokenMetric(loss.value.detach(), loss.weight, loss.count)
    return {
        name: torch.stack([(metric.value * metric.weight).sum().double(), metric.count.double()])
        for name, metric in (loss.metrics | {"loss": whole}).items()
    }
