"""Runs a model over rows: splits them into micro-batches, takes optimizer steps, and returns
results in the caller's order.
The contract between a loss and a backend: a micro-batch gives a local sum and a local integer
count. Gradients of the sums are added up over micro-batches and processes, and divided once, by the
total count. So a backend moves rows and sums; only the LossFn defines the objective.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rftmega.backends.runner.auxiliary import beside, statistics_of
from rftmega.backends.runner.flops import (
    BACKWARD,
    OF_FROZEN,
    audio_flops,
    forward_flops,
    head_cost,
    media_costs,
    row_cost,
    tower_flops,
)
from rftmega.backends.runner.micro_batches import plan_micro_batches
from rftmega.config import RunConfig
from rftmega.core import expert_routes
from rftmega.core.errors import NothingTrained
from rftmega.core.expert_routes import ChosenExperts
from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.core.ragged import Ragged
from rftmega.core.shared_prefixes import SortedRows
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import (
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
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.tower import AudioTower
from rftmega.models.kernels.teacher_terms import TaughtRows, TaughtTokens, TeacherTerm
from rftmega.runtime.device.spans import recorder
from rftmega.runtime.parallel import host_memory

log = logging.getLogger(__name__)

# by the recorder, in every pass
COUNTED = ("tokens", "computed", "slots", "flops", "bubble", "ideal", "slowest", "balanced")
LEAST_SAVED = 1 / 16  # share of tokens, below which rows are computed one by one


class Ranks(Protocol):
    """Ranks describes which rows this process computes, and whether it reports their results."""

    @property
    def data(self) -> int:
        """Returns over how many processes, or groups of processes that compute the same rows, the
        rows are split.
        """

    @property
    def data_rank(self) -> int: ...

    @property
    def speaks(self) -> bool:
        """Returns whether this process reports the results of its rows; other processes that
        compute these rows have no results, or the same ones.
        """

    def sum_of_speakers(self, x: Tensor) -> Tensor:
        """Sums x in place over the processes that report results (`speaks`); every process gets the
        total.
        """


class StepModel(Protocol):
    """StepModel is a runner's interface to a model and its optimizer."""

    cfg: RunConfig
    where: torch.device
    dtype: torch.dtype  # of the forward pass

    @property
    def description(self) -> ModelDescription: ...

    @property
    def learning_rate(self) -> float:
        """Returns the learning rate of the next optimizer step."""

    def train(self, learning: bool) -> None:
        """Switches the model to training (`learning`), where dropout may apply, or to scoring."""

    def zero_grad(self) -> None: ...

    def take_step(self) -> tuple[bool, float]:
        """Takes an optimizer step; returns (whether the step was taken, global gradient norm before
        clipping).
        """

    def finish_param_sync(self) -> None:
        """Gathers the updated parameters if the last optimizer step left that for later."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """MicroBatch holds rows, and the experience and loss to train with; without `experience` the
    rows are only scored.
    """

    rows: Rows
    temperature: float  # of the distribution that is scored
    experience: Experience | None = None  # on the device
    loss_fn: LossFn | None = None
    # collects the experts that this process's layers choose; None: not recorded
    chosen: list[ChosenExperts] | None = None
    # [B, T] bool on the host: targets whose statistics are read; those of others are 0. None: all
    needed: Tensor | None = None
    asked: TeacherRequest | None = None  # numbers of a teacher, instead of statistics
    taught: tuple[TaughtRows, ...] = ()  # by each teacher
    mask: Tensor | None = None  # [B, T] bool on the host: the tokens that teachers teach
    # the rows share the computation of common beginnings; None: they don't
    sorted_rows: SortedRows | None = None

    def taught_on(self, where: torch.device) -> list[TaughtTokens]:
        """Returns the teachers' scores of this micro-batch on the device."""
        mask = self.mask
        if mask is None:
            return []
        # the LM head is computed for the mask's tokens alone
        return [each.on(where, mask, only=self.needed is mask) for each in self.taught]


class ModelRunner:
    """ModelRunner runs scoring passes and optimizer steps of one model; every process calls its
    methods with the whole batch.
    A backend's subclass runs the micro-batches (`_run`).
    """

    # divisor and minimum of the number of micro-batches
    multiple_of, at_least = 1, 1
    lockstep = False  # processes with other rows compute every micro-batch together

    def __init__(self, model: StepModel, ranks: Ranks, stats: Any):
        """Creates the runner; `stats` is the class of a forward pass's results, TokenStats or
        TokenValues.
        """
        self.stepped, self.ranks, self.stats = model, ranks, stats
        others = ("routes", "divergence")
        self.names = [each.name for each in fields(stats) if each.name not in others]
        self.gives_values = "value" in self.names
        self.cfg = model.cfg
        self.temperature = self.cfg.rollout.temperature
        self.shares = self.cfg.trainer.share_prefixes and not self.why_nothing_shared()
        if self.cfg.trainer.share_prefixes and not self.shares:
            _tell_once(self.why_nothing_shared())
        self.backward = OF_FROZEN if self.cfg.model.lora.rank else BACKWARD
        # called after each optimizer step taken
        self.after_step: Callable[[], None] = lambda: None
        # the distillation term of each of `Experience.teachers`
        self.terms: Sequence[TeacherTerm] = ()

    def _run(self, batches: Sequence[MicroBatch], *, forward_only: bool) -> list[Any]:
        """Runs this process's micro-batches, forward and, unless `forward_only`, backward, and
        divides the gradients by the total count of all processes.
        Returns for each micro-batch the third result of `trained` or, when scoring, its `stats`, or
        what `told` makes of a teacher's numbers; [] on a process whose results another process
        reports.
        """
        raise NotImplementedError

    def _slots(self, counts: Sequence[int]) -> int:
        """Returns the number of token slots, padding included, that rows with `counts` tokens
        occupy in a forward pass.
        """
        raise NotImplementedError

    def why_nothing_shared(self) -> str:
        """Returns why each row computes its beginning itself, though trainer.share_prefixes is set;
        "" if rows that begin alike share its computation.
        """
        raise NotImplementedError

    @torch.no_grad()
    def score(
        self, rows: Rows[Any], *, temperature: float | None = None, record: bool = False
    ) -> Any:
        """Returns the statistics (of class `stats`: log-probs and entropies, or values) of every
        target token of `rows` on the host, without gradient, in the format of the columns of
        `rows`.

        `temperature`: None for `rollout.temperature`. `record`: the result also contains the expert
        choices of the tokens.
        """
        self.stepped.finish_param_sync()
        chosen = self.temperature if temperature is None else temperature
        self.stepped.train(False)
        indices, sorted_rows = self._micro_batches(rows, passes=1)
        batches = [
            MicroBatch(
                self._model_inputs(rows.select(index)),
                chosen,
                chosen=[] if record else None,
                sorted_rows=own,
            )
            for index, own in zip(indices, sorted_rows, strict=True)
        ]
        stats = self._gathered(rows, indices, self._run(batches, forward_only=True))
        if record:
            return replace(stats, routes=self._gathered_routes(rows, indices, batches))
        return stats

    @torch.no_grad()
    def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
        """Returns the requested numbers of the tokens of the mask of `rows`, on the host, one copy
        per host, without gradient, at the temperature of the rollouts.
        """
        self.stepped.finish_param_sync()
        self.stepped.train(False)
        indices, sorted_rows = self._micro_batches(rows, passes=1, masked=True)
        batches = []
        for index, own in zip(indices, sorted_rows, strict=True):
            fed = self._model_inputs(replace(rows.select(index), routes=None))
            asked = MicroBatch(
                fed, self.temperature, needed=fed.mask, asked=request, sorted_rows=own
            )
            batches.append(asked)
        found = self._run(batches, forward_only=True)
        told = zip(indices, found, strict=False) if self.ranks.speaks else ()
        counts = rows.mask.sums() if isinstance(rows.mask, Ragged) else rows.mask.sum(1)
        columns = host_memory.current().of_tokens(
            counts, request.columns(self.stepped.description.hidden, self.stepped.dtype), told
        )
        return TeacherScores(torch.ones(len(rows), dtype=torch.bool), **columns)

    def forward(self, rows: Rows) -> Any:
        """Returns the statistics of the target tokens [B, T] of this process's own `rows`, on the
        host and with gradient, for a loss that the caller computes. The rows are one micro-batch.

        Processes that share a model's layers must pass the same rows, and all processes must call
        this the same number of times. Raises NotImplementedError if the model is cut into pipeline
        stages, whose schedule runs forward and backward passes together.
        """
        self.stepped.finish_param_sync()
        self.stepped.train(True)
        found = self._forward(MicroBatch(self._model_inputs(rows), self.temperature))
        names = {name: getattr(found, name).cpu() for name in self.names}
        return self.stats(**names)

    def _forward(self, batch: MicroBatch) -> Any:
        """Returns the statistics of all target tokens [B, T] of one micro-batch, with gradient."""
        raise NotImplementedError

    def _model_inputs(self, rows: Rows[Any]) -> Rows:
        """Returns rows in padded form, as model inputs.

        Only a policy uses `routes`; since they are large, they are padded later, when their
        micro-batch is computed.
        """
        fed = replace(rows, routes=None).padded()
        return fed if self.gives_values else replace(fed, routes=rows.routes)

    def _gathered_routes(
        self, rows: Rows[Any], indices: Sequence[Tensor], batches: Sequence[MicroBatch]
    ) -> Any:
        """Returns the expert choices of all rows, one copy per host, gathered from the choices that
        the processes recorded in their micro-batches.

        `batches`: this process's micro-batches; `indices` lists the rows of each.
        """
        experts = self.stepped.description.experts
        assert experts is not None, "a dense model has no routes"
        kind, shape = expert_routes.kind_of(experts.number), (len(experts.layers), experts.active)
        targets = (rows.lengths - 1).clamp(min=0)
        starts = targets.cumsum(0) - targets

        def write(memory: Sequence[Tensor]) -> None:
            values = memory[0].view(-1, *shape)
            for index, batch in zip(indices, batches, strict=True):
                columns = batch.rows.tokens.shape[1] - 1
                for slots, layer, chosen in batch.chosen or ():
                    places = starts[index[slots // columns]] + slots % columns
                    values[places, layer] = chosen.to("cpu", kind)

        size = int(targets.sum()) * math.prod(shape)
        (found,) = host_memory.current().filled([(kind, size)], write)
        routes = Ragged.packed(found.view(-1, *shape), targets)
        if isinstance(rows.tokens, Ragged):
            return routes
        return routes.padded(width=rows.tokens.shape[1] - 1, fill=expert_routes.unknown(kind))

    def _gathered(self, rows: Rows[Any], indices: Sequence[Tensor], found: Sequence[Any]) -> Any:
        """Returns the statistics of all rows, one copy per host, gathered from the processes'
        micro-batches.

        `found`: the statistics of each of this process's micro-batches; `indices` lists the rows of
        each.
        """
        own = []
        if self.ranks.speaks:
            for index, stats in zip(indices, found, strict=False):  # those of an auxiliary follow
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
        """Takes one optimizer step on the rows of `experience` and of `auxiliary`, and returns
        metrics; see `interfaces.Policy.step`.
        Each group of `group_size` consecutive rows is passed to `loss_fn` together. `scored` is
        called with the statistics of all rows. A step with non-finite gradients is skipped on all
        processes, and so is a step whose losses count nothing: its gradient is 0, and weight decay
        alone would change the weights. Raises NothingTrained if the loss has a gradient but the
        adapters get none.
        """
        before = {name: recorder.counted(name) for name in COUNTED}
        learning_rate = self.stepped.learning_rate
        self.stepped.train(True)
        self.stepped.zero_grad()
        # whoever gets the statistics reads those of truncated rows, too, which are not trained on
        whole = self.gives_values or (scored is not None and self.cfg.algorithm.drop_truncated)
        planned = self._micro_batches(
            experience, group_size, passes=1 + self.backward, masked=not whole
        )
        batches = self._to_learn(experience, planned, loss_fn, self.temperature, whole=whole)
        losses = [(loss_fn, experience)]
        if auxiliary is not None:
            second = beside(loss_fn, experience, auxiliary, self.stats)
            more = self._micro_batches(
                auxiliary.experience, passes=1 + self.backward, masked=not self.gives_values
            )
            batches += self._to_learn(auxiliary.experience, more, second, temperature=1.0)
            losses.append((second, auxiliary.experience))
        found = self._run(batches, forward_only=False)
        if scored is not None:
            scored(self._gathered(experience.rows, planned[0], [stats for _, stats in found]))
        metrics = self._mean([sums for sums, _ in found], losses)
        empty = not metrics["count"]  # of all processes
        taken, grad_norm = (False, 0.0) if empty else self.stepped.take_step()
        if empty:
            self.stepped.zero_grad()
        elif grad_norm == 0 and self.cfg.model.lora.rank:
            self._refuse_lost_gradient(batches, [stats for _, stats in found])
        if taken:
            self.after_step()
        metrics |= {"grad_norm": grad_norm, "learning_rate": learning_rate}
        metrics |= {
            "optimizer_steps": float(taken),
            "skipped_steps": float(not taken and not empty),
            "empty_steps": float(empty),
        }
        return metrics | {COUNT + name: recorder.counted(name) - before[name] for name in COUNTED}

    def _to_learn(
        self,
        experience: Experience[Any],
        planned: "PlannedRows",
        loss_fn: LossFn,
        temperature: float,
        *,
        whole: bool = False,
    ) -> list[MicroBatch]:
        """Returns the micro-batches of a step. The LM head is computed for the tokens of the mask
        only, since a loss reads no others (prompts). `whole`: it is computed for all tokens.
        """
        whole = whole or self.gives_values
        parts = [experience.select(index) for index in planned.indices]
        # a loss reads none of these
        unread: dict[str, Any] = {"routes": None, "teacher_logp": {}, "teacher_prompts": {}}
        bare = [replace(part, **unread).padded() for part in parts]
        terms = self._terms_of(experience)

        def needed(seen: Experience) -> Tensor | None:
            if not whole:
                return seen.mask
            # a teacher says something of each row's own tokens: equal predictions are not merged
            columns = torch.arange(seen.mask.shape[1])
            return columns < seen.lengths[:, None] - 1 if terms else None

        return [
            MicroBatch(
                self._model_inputs(part.rows),
                temperature,
                seen.to(self.stepped.where),
                loss_fn,
                needed=needed(seen),
                taught=tuple(map(TaughtRows, terms, part.teachers)),
                mask=seen.mask if terms else None,
                sorted_rows=own,
            )
            for part, seen, own in zip(parts, bare, planned.sorted_rows, strict=True)
        ]

    def _terms_of(self, experience: Experience[Any]) -> list[TeacherTerm]:
        """Returns the distillation term of each teacher of `experience`, on the device."""
        if self.gives_values or not experience.teachers:
            return []
        assert len(self.terms) == len(experience.teachers), "a term for each teacher"
        return [term.to(self.stepped.where) for term in self.terms]

    def trained(self, stats: Any, batch: MicroBatch) -> tuple[Tensor, Tensor, Any]:
        """Computes the loss of a micro-batch. Returns (loss, count, (metrics, statistics)).

        `stats`: the forward pass's statistics of the micro-batch's tokens, with gradient. The loss
        is the differentiable sum over this process's tokens. The count is `TokenLoss.count`, by
        which the sum over all micro-batches is divided. The metrics are sums as well, and the
        statistics are `stats` without gradient.
        """
        seen = self.stats(*(getattr(stats, name).detach() for name in self.names))
        if batch.taught:
            seen = replace(seen, divergence=stats.divergence.detach())
        loss = self._loss_of(stats, seen, batch)
        total = (loss.value * loss.weight).sum()
        return total, loss.count, (sums_of(loss), seen)

    def told(self, values: Mapping[str, Tensor], batch: MicroBatch) -> dict[str, Tensor]:
        """Selects a teacher's numbers of the taught tokens of a micro-batch, and copies them to the
        host, [n, ...] each. `values`: the numbers of all tokens [B, T, ...].
        """
        assert batch.needed is not None
        places = batch.needed.flatten().nonzero()[:, 0]
        return {
            name: value.flatten(0, 1)[places.to(value.device)].cpu()
            for name, value in values.items()
        }

    def _loss_of(self, stats: Any, seen: Any, batch: MicroBatch) -> TokenLoss:
        assert batch.experience is not None and batch.loss_fn is not None
        experience = batch.experience
        # no optimizer step since the rollout
        if experience.old_logp is None and not self.gives_values:
            experience = replace(experience, old_logp=seen.logp)
        return batch.loss_fn(stats, experience)

    def _refuse_lost_gradient(self, batches: Sequence[MicroBatch], found: Sequence[Any]) -> None:
        """Raises NothingTrained, on every process, if the loss has a gradient with respect to a
        statistic such as a log-prob, although no parameter has a gradient.

        `found`: the statistics of each of `batches`. A loss without such a gradient (all advantages
        of the batch are 0) is a normal step.
        """
        pulled = torch.zeros(1, dtype=torch.int64, device=self.stepped.where)
        for batch, seen in zip(batches, found, strict=False):  # a stage without the loss has none
            held = [getattr(seen, name).clone().requires_grad_() for name in self.names]
            stats = self.stats(*held)
            if batch.taught:
                held.append(seen.divergence.clone().requires_grad_())
                stats = replace(stats, divergence=held[-1])
            loss = self._loss_of(stats, seen, batch)
            pulls = torch.autograd.grad(
                (loss.value * loss.weight).sum(), held, allow_unused=True, materialize_grads=True
            )
            pulled += sum(int(pull.count_nonzero()) for pull in pulls)
        number = int(self.ranks.sum_of_speakers(pulled))
        if number:
            raise NothingTrained(
                f"The gradient of this step is exactly 0, though its loss pulls at {number} values: no gradient reaches the "
                "adapters, and the run would learn nothing. Something between them and the loss is cut off, as recomputation "
                "behind a frozen layer does; this is a bug of rftmega's, or of a plugin's. parallel.recompute=none may avoid it."
            )

    def _micro_batches(
        self,
        batch: Rows[Any] | Experience[Any],
        group_size: int = 1,
        *,
        passes: int,
        masked: bool = False,
    ) -> "PlannedRows":
        """Returns the rows of each of this process's micro-batches of `batch`, and records their
        cost over all processes.

        Each group of `group_size` consecutive rows stays in one micro-batch. `passes`: the cost of
        the computation in forward passes, such as 3 with a backward pass. `masked`: the LM head is
        computed for the tokens of the mask only.
        """
        lengths, images = batch.lengths, batch.images
        sorted_rows = self._sorted(batch)
        planned = plan_micro_batches(
            lengths.tolist(),
            data_parallel=self.ranks.data,
            token_cap=self.cfg.trainer.max_tokens_per_micro_batch,
            attention_cap=self.cfg.trainer.max_attention_per_micro_batch or None,
            cost=row_cost(self.stepped.description),
            extra_costs=self._costs_beside(batch, passes, masked),
            lockstep=self.lockstep,
            multiple_of=self.multiple_of,
            at_least=self.at_least,
            group_size=group_size,
            patches=None if images is None else images.patches,
            patch_cap=self.cfg.trainer.max_patches_per_micro_batch or None,
            sorted_rows=sorted_rows,
        )
        recorder.count("slowest", passes * planned.slowest(self.lockstep))
        recorder.count("balanced", passes * planned.mean)
        plan = planned.rows
        tokens = (lengths - 1).tolist()
        fed = [[tokens[row] for row in rows] for batches in plan for rows in batches]
        shared: list[list[int]] = []
        if sorted_rows is not None:
            shared = [
                sorted_rows.select(rows).shared.tolist() for batches in plan for rows in batches
            ]
        self._count(
            fed,
            shared,
            passes,
            int(batch.mask.sums().sum() if isinstance(batch.mask, Ragged) else batch.mask.sum())
            if masked
            else None,
        )
        if images is not None:
            self._count_images([images.select(rows) for own in plan for rows in own], passes)
        own = plan[self.ranks.data_rank]
        parts = [_saving(sorted_rows, rows) for rows in own]
        return PlannedRows([torch.tensor(rows, dtype=torch.int64) for rows in own], parts)

    def _costs_beside(
        self, batch: Rows[Any] | Experience[Any], passes: int, masked: bool
    ) -> list[float]:
        """Returns the cost of each row outside the layers, in tokens (`flops.row_cost`): of the LM
        head, for the tokens of the mask only if `masked`, and of the images.
        """
        model = self.stepped.description
        if self.gives_values:
            found = [0.0] * len(batch.lengths)
        else:
            counts = batch.lengths - 1
            if masked:
                counts = batch.mask.sums() if isinstance(batch.mask, Ragged) else batch.mask.sum(1)
            found = (head_cost(model) * counts).tolist()
        if batch.images is None:
            return found
        share = 1 / passes if self.cfg.model.freeze_vision else 1.0
        return [
            head + share * media
            for head, media in zip(found, media_costs(model, batch.images), strict=True)
        ]

    def _sorted(self, batch: Rows[Any] | Experience[Any]) -> SortedRows | None:
        """Returns the rows in the order of their tokens if computing common beginnings once saves
        work; None: each row is computed by itself.
        """
        if not self.shares or len(batch.lengths) < 2:
            return None
        found = SortedRows.of(batch.tokens, (batch.lengths - 1).clamp(min=0), batch.images)
        saved = int(found.shared.sum())
        return found if saved >= LEAST_SAVED * int(found.lengths.sum()) and saved else None

    def _count(
        self,
        fed: Sequence[Sequence[int]],
        shared: Sequence[Sequence[int]],
        passes: int,
        predicted: int | None = None,
    ) -> None:
        """Records the tokens, slots and FLOPs of all processes; `fed` lists the number of tokens of
        each row by micro-batch, `shared` those that are computed with other rows, `passes` the cost
        in forward passes, `predicted` the tokens for which the LM head is computed (None: all).
        """
        rows = [tokens for batch in fed for tokens in batch]
        saved = [tokens for batch in shared for tokens in batch if tokens]
        recorder.count("tokens", sum(rows))
        recorder.count("computed", sum(rows) - sum(saved))
        slots = (
            self._slots([sum(batch) - sum(own)]) if any(own) else self._slots(batch)
            for batch, own in zip(fed, shared or [()] * len(fed), strict=True)
        )
        recorder.count("slots", sum(slots))
        flops = forward_flops(
            self.stepped.description,
            rows,
            value_head=self.gives_values,
            predicted=sum(rows) if predicted is None else predicted,
        )
        if saved:
            flops -= forward_flops(self.stepped.description, saved, predicted=0)
        recorder.count("flops", passes * flops)

    def _count_images(self, fed: Sequence[RowImages], passes: int) -> None:
        """Records the FLOPs of the vision or audio encoder; `fed` lists the images of each
        micro-batch, where an image that several rows share counts once, `passes` the cost in
        forward passes.
        """
        tower = self.stepped.description.tower
        assert tower is not None, "a model without a tower has no images"
        media = [each for batch in fed for each in batch.distinct.values()]
        if isinstance(tower, AudioTower):
            flops = len(media) * audio_flops(tower, self.stepped.description.hidden)
        else:
            grids = [each.grid for each in media if isinstance(each, PlacedImage)]
            flops = tower_flops(tower, grids)
        learns = not self.cfg.model.freeze_vision
        recorder.count("flops", (passes if learns else 1) * flops)

    def _mean(
        self,
        micro_sums: Sequence[dict[str, Tensor]],
        losses: Sequence[tuple[LossFn, Experience[Any]]],
    ) -> Metrics:
        """Returns metric name -> mean: the metric's sum over all micro-batches and ranks divided by
        its total count; "count" is the count of the loss. One collective.

        `micro_sums`: the `sums_of` each of this process's micro-batches. `losses`: the step's loss
        functions with their rows, from which every process derives the metrics' names.
        """
        # Stages that never see the loss get the names of its metrics from an empty batch.
        names = list(
            dict.fromkeys(
                name for loss_fn, experience in losses for name in self._names(loss_fn, experience)
            )
        )
        totals = torch.zeros(len(names), 2, dtype=torch.float64, device=self.stepped.where)
        for sums in micro_sums:
            totals += torch.stack(
                [sums[name] if name in sums else totals.new_zeros(2) for name in names]
            )
        total = dict(zip(names, self.ranks.sum_of_speakers(totals).tolist(), strict=True))
        return {name: value / max(count, 1) for name, (value, count) in total.items()} | {
            "count": total["loss"][1]
        }

    def _names(self, loss_fn: LossFn, experience: Experience[Any]) -> list[str]:
        nothing = experience.select(torch.zeros(0, dtype=torch.int64)).padded()
        empty = nothing.advantage
        stats = statistics_of(self.stats, empty, teachers=len(nothing.teachers))
        return list(sums_of(loss_fn(stats, replace(nothing, old_logp=empty))))


class PlannedRows(NamedTuple):
    """PlannedRows are the rows of each of this process's micro-batches."""

    indices: list[Tensor]
    sorted_rows: list[SortedRows | None]  # None: no rows of the micro-batch share tokens


def _saving(sorted_rows: SortedRows | None, rows: Sequence[int]) -> SortedRows | None:
    """Returns the rows of a micro-batch in their order, numbered within it; None if they share
    nothing.
    """
    if sorted_rows is None:
        return None
    found = sorted_rows.select(rows)
    return found if bool(found.shared.any()) else None


def sums_of(loss: TokenLoss) -> dict[str, Tensor]:
    """Returns metric name -> [2]: the metric's weighted sum and its count, in float64, also for the
    loss under the name "loss"; both are added up over micro-batches and ranks.
    """
    whole = TokenMetric(loss.value.detach(), loss.weight, loss.count)
    return {
        name: torch.stack([(metric.value * metric.weight).sum().double(), metric.count.double()])
        for name, metric in (loss.metrics | {"loss": whole}).items()
    }


@cache
def _tell_once(why: str) -> None:
    log.info("Each sequence computes its beginning itself (trainer.share_prefixes): %s.", why)


def refusal_to_share(config: RunConfig, where: torch.device, dtype: torch.dtype) -> str:
    """Returns why rows can't share the computation of common beginnings, for any backend; "" if
    they can.
    """
    if config.rollout.router_replay != "none":
        return "rollout.router_replay gives each row its own experts"
    if config.model.dropout or (config.model.lora.rank and config.model.lora.dropout):
        return "dropout is above 0"
    if where.type == "cuda" and dtype == torch.float32:
        return "the attention kernel for it takes half precision"
    return ""
