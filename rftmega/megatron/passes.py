"""A model over rows: micro-batches, pipeline schedule, optimizer steps, results back in the caller's order.

Megatron's contract with `calculate_per_token_loss`: the loss function gives (local sum, local integer count, anything);
gradients are divided once, by the count of all micro-batches and ranks. So this file moves rows and sums; what is learnt
is the LossFn's business.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rftmega.megatron.forward import HiddenProcessor, custom_forward
from rftmega.megatron.manager import MegatronModelManager
from rftmega.parallel.micro_batches import plan_micro_batches
from rftmega.types import Experience, LossFn, Metrics, Rows, TokenLoss

MicroBatch = tuple[Rows, Experience | None]  # what to compute, and what to learn from it (None: only score)


class Passes:
    """Scoring passes and optimizer steps of one model; every process calls them with the whole batch."""

    def __init__(self, manager: MegatronModelManager, stats: Any, processor: HiddenProcessor | None):
        """`stats` (TokenStats or TokenValues) is what a forward gives; `processor` makes it, or None for a value model."""
        self.manager = manager
        self.topology = manager.topology
        self.stats = stats
        self.names: list[str] = list(stats.__dataclass_fields__)
        self.processor = processor
        self.cfg = manager.cfg
        self.after_step: Callable[[], None] = lambda: None  # called once an optimizer step that was taken

    @torch.no_grad()
    def score(self, rows: Rows) -> Any:
        """`stats` of every target, [B, T] on the host; no gradient."""
        for chunk in self.manager.model:
            chunk.eval()
        indices = self._micro_batches(rows.lengths)
        found = self._run([(rows.select(index), None) for index in indices], self.finish(None), forward_only=True)
        canvas = torch.zeros(len(self.names), *rows.tokens[:, 1:].shape, device=self.manager.where)
        for index, stats in zip(indices, found, strict=False):  # stages but the last found nothing
            values = torch.stack([getattr(stats, name) for name in self.names])
            canvas[:, index, : values.shape[-1]] = values
        return self.stats(*self.topology.sum_of_speakers(canvas).cpu())

    def update(self, experience: Experience, loss_fn: LossFn, *, group_size: int = 1) -> Metrics:
        """One optimizer step for each mini-batch (consecutive rows); metrics are averaged over the steps taken.

        Each `group_size` consecutive rows come before `loss_fn` together. A step with non-finite gradients is skipped on all
        processes alike and counted in "skipped_steps".
        """
        groups = torch.arange(len(experience)).view(-1, group_size)
        parts = groups.tensor_split(min(self.cfg.algorithm.mini_batches, len(groups)))
        steps = [self._optimizer_step(experience.select(index.flatten()), loss_fn, group_size) for index in parts]
        self.manager.finish_param_sync()
        taken = [step for step in steps if not step["skipped_steps"]]
        averaged = taken or steps
        mean = {name: sum(step[name] for step in averaged) / len(averaged) for name in steps[0]}
        return mean | {"skipped_steps": float(len(steps) - len(taken))}

    def _optimizer_step(self, experience: Experience, loss_fn: LossFn, group_size: int) -> Metrics:
        learning_rate = self.manager.learning_rate
        for chunk in self.manager.model:
            chunk.train()
        self.manager.zero_grad()
        indices = self._micro_batches(experience.lengths, group_size)
        batches = [(experience.rows.select(index), experience.select(index).to(self.manager.where)) for index in indices]
        micro_sums = self._run(batches, self.finish(loss_fn), forward_only=False)
        metrics = self._mean(micro_sums, loss_fn, experience)
        taken, grad_norm = self.manager.optimizer_step()
        if taken:
            self.after_step()
        return metrics | {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped_steps": float(not taken)}

    def _micro_batches(self, lengths: Tensor, group_size: int = 1) -> list[Tensor]:
        plan = plan_micro_batches(
            lengths.tolist(),
            data_parallel=self.topology.data,
            token_cap=self.cfg.trainer.max_tokens_per_micro_batch,
            attention_cap=self.cfg.trainer.max_attention_per_micro_batch or None,
            attention_weight=self.cfg.trainer.attention_weight,
            # The interleaved schedule hands micro-batches round the stages in groups of as many as there are stages.
            multiple_of=self.topology.pipeline if len(self.manager.model) > 1 else 1,
            group_size=group_size,
        )
        return [torch.tensor(rows, dtype=torch.int64) for rows in plan[self.topology.data_rank]]

    def _run(self, batches: Sequence[MicroBatch], finish: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """What `finish` made of each micro-batch on the last stage, [] on the others."""
        return self.manager.run_schedule(partial(self.forward_step, finish), batches, forward_only=forward_only)

    def forward_step(self, finish: Callable[..., Any], batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        """What Megatron's schedule calls for each micro-batch and chunk: (output, what to do with it on the last stage)."""
        rows, experience = next(batches)
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
            temperature=self.cfg.rollout.temperature,
            max_batch_seqlen=None,  # the plan has a cap of its own
        )
        if isinstance(output, dict):  # the schedule wants to see a tensor; all of them go to `finish`
            return next(iter(output.values())), partial(finish, experience, output)
        return output, partial(finish, experience, output)

    def finish(self, loss_fn: LossFn | None) -> Callable[..., Any]:
        """What to make of a micro-batch's output on the last stage: something to learn from, or its statistics."""
        return partial(self._loss, loss_fn) if loss_fn else self._stats

    def _stats(self, experience: Experience | None, output: Any, shown: Any = None, non_loss_data: bool = True) -> Any:
        return self.stats(output) if self.processor is None else self.stats(**output)

    def _loss(self, loss_fn: LossFn, experience: Experience, output: Any, shown: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's three: local sum with its graph, integer count, sums to be collected."""
        loss = loss_fn(self._stats(None, output), experience)
        total = (loss.value * loss.weight).sum()
        # Context-parallel processes all have the whole rows, and their gradients add up: one of them counts.
        counted = loss.count if self.topology.context_rank == 0 else torch.zeros_like(loss.count)
        return total, counted.int(), sums_of(loss)

    def _mean(self, micro_sums: Sequence[dict[str, Tensor]], loss_fn: LossFn, experience: Experience) -> Metrics:
        """Sums of all micro-batches and ranks, divided by the count of all; one collective."""
        # Stages that never see the loss learn its metrics' names from a batch of no rows.
        nothing = experience.select(torch.zeros(0, dtype=torch.int64))
        names = list(sums_of(loss_fn(self.stats(*[nothing.old_logp] * len(self.names)), nothing)))
        totals = torch.zeros(len(names), dtype=torch.float64, device=self.manager.where)
        for sums in micro_sums:
            totals += torch.stack([sums[name].double() for name in names])
        total = dict(zip(names, self.topology.sum_of_speakers(totals).tolist(), strict=True))
        count = total.pop("count")
        return {name: value / max(count, 1) for name, value in total.items()} | {"count": count}


def sums_of(loss: TokenLoss) -> dict[str, Tensor]:
    """What adds up over micro-batches and ranks: every metric times the loss's weight, the loss itself, the count."""
    sums = {name: (value * loss.weight).sum() for name, value in loss.metrics.items()}
    return sums | {"loss": (loss.value.detach() * loss.weight).sum(), "count": loss.count}
