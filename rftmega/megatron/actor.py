"""MegatronActor: scores rows and learns from experience under any layout.

Megatron's contract with `calculate_per_token_loss`: the loss function gives (local sum, local integer count, anything);
gradients are divided once, by the count of all micro-batches and ranks. So this file moves rows and sums; what is learnt
is the LossFn's business.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rftmega.megatron.forward import Packed, hidden_states_only, pack, stats_of_hidden
from rftmega.megatron.manager import MegatronModelManager, ReferenceWeights
from rftmega.parallel.micro_batches import plan_micro_batches
from rftmega.types import Experience, LossFn, Metrics, Rows, TokenLoss, TokenStats

MicroBatch = tuple[Packed, Experience | None]  # what to compute, and what to learn from it (None: only score)


class MegatronActor:
    """The policy. Every process calls its methods with the whole batch and gets the whole result."""

    def __init__(
        self,
        manager: MegatronModelManager,
        *,
        temperature: float,
        token_cap: int,
        mini_batches: int = 1,
        keep_reference: bool = False,
    ):
        """`temperature` is the engine's: log-probs are of the distribution that was sampled from."""
        self.manager = manager
        self.topology = manager.topology
        self.temperature = temperature
        self.token_cap = token_cap
        self.mini_batches = mini_batches
        self.reference = ReferenceWeights(manager) if keep_reference else None

    def log_probs(self, rows: Rows) -> TokenStats:
        """Log-prob and entropy of every target, [B, T] on the host; no gradient."""
        shape = (2, *rows.tokens[:, 1:].shape)
        canvas = torch.zeros(shape, device=self.manager.where)
        for index, stats in self._score(rows):
            width = stats.logp.shape[1]
            assert stats.entropy is not None
            canvas[:, index, :width] = torch.stack([stats.logp, stats.entropy])
        logp, entropy = self.topology.sum_of_last_stages(canvas).cpu()
        return TokenStats(logp, entropy)

    def reference_log_probs(self, rows: Rows) -> TokenStats:
        """The same under the reference weights. Raises AssertionError where none are kept."""
        assert self.reference is not None, "built without keep_reference"
        with self.reference.swapped_in():
            return self.log_probs(rows)

    def update(self, experience: Experience, loss_fn: LossFn) -> Metrics:
        """One optimizer step for each mini-batch (consecutive rows); metrics are averaged over the steps taken.

        A step with non-finite gradients is skipped on all processes alike and counted in "skipped_steps".
        """
        parts = torch.arange(len(experience)).tensor_split(self.mini_batches)
        steps = [self._optimizer_step(experience.select(index), loss_fn) for index in parts]
        taken = [step for step in steps if not step["skipped_steps"]]
        averaged = taken or steps
        mean = {name: sum(step[name] for step in averaged) / len(averaged) for name in steps[0]}
        return mean | {"skipped_steps": float(len(steps) - len(taken))}

    def _optimizer_step(self, experience: Experience, loss_fn: LossFn) -> Metrics:
        learning_rate = self.manager.learning_rate
        for chunk in self.manager.model:
            chunk.train()
        self.manager.zero_grad()
        indices = self._micro_batches(experience.lengths)
        batches = [(self._pack(experience.rows, index), experience.select(index).to(self.manager.where)) for index in indices]
        micro_sums = self._run(batches, partial(self._loss_of_hidden, loss_fn), forward_only=False)
        metrics = self._mean(micro_sums, loss_fn, experience)
        taken, grad_norm = self.manager.optimizer_step()
        return metrics | {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped_steps": float(not taken)}

    @torch.no_grad()
    def _score(self, rows: Rows) -> list[tuple[Tensor, TokenStats]]:
        """(row indices, their statistics) a micro-batch on the last stage, nothing elsewhere."""
        for chunk in self.manager.model:
            chunk.eval()
        indices = self._micro_batches(rows.lengths)
        found = self._run([(self._pack(rows, index), None) for index in indices], self._stats_of_hidden, forward_only=True)
        return list(zip(indices, found, strict=True)) if found else []

    def _micro_batches(self, lengths: Tensor) -> list[Tensor]:
        plan = plan_micro_batches(lengths.tolist(), data_parallel=self.topology.data, token_cap=self.token_cap)
        return [torch.tensor(rows, dtype=torch.int64) for rows in plan[self.topology.data_rank]]

    def _pack(self, rows: Rows, index: Tensor) -> Packed:
        # Sequence parallelism splits the packed tokens between the tensor-parallel ranks.
        multiple_of = self.topology.tensor if self.manager.config.sequence_parallel else 1
        return pack(rows.select(index), multiple_of=multiple_of, where=self.manager.where)

    def _run(self, batches: Sequence[MicroBatch], finish: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Runs the pipeline schedule; what `finish` made of each micro-batch on the last stage, [] on the others."""
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, finish),
            data_iterator=iter(batches),
            model=self.manager.model[0],
            num_microbatches=len(batches),
            seq_length=1,  # ignored: the stages tell each other the shape of each micro-batch
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_step(self, finish: Callable[..., Any], batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
        packed, experience = next(batches)
        with hidden_states_only(self.manager.chunks[0]):
            hidden = model(packed.tokens, packed.positions, None, packed_seq_params=packed.sequence)
        return hidden, partial(finish, packed, experience)

    def _stats_of_hidden(self, packed: Packed, experience: None, hidden: Tensor, non_loss_data: bool = True) -> TokenStats:
        return stats_of_hidden(
            hidden,
            packed,
            self.manager.chunks[0],
            self.topology,
            vocabulary=self.manager.description.vocabulary,
            temperature=self.temperature,
        )

    def _loss_of_hidden(
        self, loss_fn: LossFn, packed: Packed, experience: Experience, hidden: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's three: local sum with its graph, integer count, sums to be collected."""
        loss = loss_fn(self._stats_of_hidden(packed, None, hidden), experience)
        total = (loss.value * loss.weight).sum()
        return total, loss.count.int(), sums_of(loss)

    def _mean(self, micro_sums: Sequence[dict[str, Tensor]], loss_fn: LossFn, experience: Experience) -> Metrics:
        """Sums of all micro-batches and ranks, divided by the count of all; one collective."""
        # Stages that never see the loss learn its metrics' names from a batch of no rows.
        nothing = experience.select(torch.zeros(0, dtype=torch.int64))
        names = list(sums_of(loss_fn(TokenStats(nothing.old_logp, nothing.old_logp), nothing)))
        totals = torch.zeros(len(names), dtype=torch.float64, device=self.manager.where)
        for sums in micro_sums:
            totals += torch.stack([sums[name].double() for name in names])
        total = dict(zip(names, self.topology.sum_of_last_stages(totals).tolist(), strict=True))
        count = total.pop("count")
        return {name: value / max(count, 1) for name, value in total.items()} | {"count": count}


def sums_of(loss: TokenLoss) -> dict[str, Tensor]:
    """What adds up over micro-batches and ranks: every metric times the loss's weight, the loss itself, the count."""
    sums = {name: (value * loss.weight).sum() for name, value in loss.metrics.items()}
    return sums | {"loss": (loss.value.detach() * loss.weight).sum(), "count": loss.count}
