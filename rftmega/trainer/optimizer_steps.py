"""`take_steps` trains on one rollout batch, split into epochs and mini-batches with one optimizer
step per mini-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rftmega.core.types import COUNT, Auxiliary, Experience, LossFn, Metrics, TokenStats, Told
from rftmega.trainer.journal import Journal

# counts of steps with a non-finite gradient and of steps without trained tokens
NOT_TAKEN = ("skipped_steps", "empty_steps")
SEED_STRIDE = 1_000_003  # separates the shuffle seeds of consecutive steps


class Steps(Protocol):
    """Steps is a model with a method `step` that takes an optimizer step
    (`interfaces.Policy.step`).
    """

    @property
    def step(self) -> Callable[..., Metrics]: ...


@dataclass(frozen=True)
class Schedule:
    """Schedule defines the epochs over a rollout batch and the number of mini-batches (optimizer
    steps) per epoch, `updates_per_epoch`.
    """

    updates_per_epoch: int = 1
    epochs: int = 1
    seed: int = 0

    def mini_batches(self, sizes: Tensor, step: int) -> list[Tensor]:
        """Returns the rows ([n] int64) of each optimizer step.

        `sizes` ([units] int64) is the number of consecutive rows of each unit (a rollout or a
        pair), which stay together. The first epoch takes units in the order of the rollout phase,
        later epochs in an order drawn from `seed` and `step`, the number of the training step.
        """
        rows = torch.arange(int(sizes.sum())).split(sizes.tolist())
        parts = min(self.updates_per_epoch, len(sizes))
        orders = [torch.arange(len(sizes))]
        random = torch.Generator().manual_seed(self.seed * SEED_STRIDE + step)
        for _ in range(1, self.epochs):
            orders.append(torch.randperm(len(sizes), generator=random))
        chosen = [units for order in orders for units in order.tensor_split(parts)]
        return [torch.cat([rows[unit] for unit in units.tolist()]) for units in chosen]


def take_steps(
    model: Steps,
    experience: Experience[Any],
    loss_fn: LossFn,
    mini_batches: Sequence[Tensor],
    *,
    auxiliary: Auxiliary | None = None,
    scored: Told | None = None,
    journal: Journal | None = None,
    name: str = "policy",
    **settings: Any,
) -> Metrics:
    """Takes an optimizer step on each of `mini_batches` (rows of `experience`, [n] int64) and
    returns the merged metrics. `name`: the model's name in the journal; `settings`: further
    arguments of `model.step`.

    The rows of `auxiliary` are split over the mini-batches.

    Metrics are means over the steps taken (over all steps if none was taken), except
    "optimizer_steps", "skipped_steps", "empty_steps" and counts, which are sums. Steps recorded in
    the `journal` before a resume are not repeated. Raises AssertionError for `scored` (see
    `interfaces.Policy.step`) with several mini-batches, and Preempted if the run is asked to stop.
    """
    assert scored is None or len(mini_batches) == 1, (
        "only a single step's forward pass gives the log-probs before the update"
    )
    beside = [None] * len(mini_batches) if auxiliary is None else auxiliary.split(len(mini_batches))
    steps: list[Metrics] = []
    for rows, share in zip(mini_batches, beside, strict=True):
        given = dict(settings)
        if share is not None:
            given["auxiliary"] = share
        if scored is not None:
            given["scored"] = _kept(
                journal, scored, f"log-probs of {len(rows)} rows in their update"
            )
        if journal is not None and journal.behind:
            if scored is not None:  # forward pass and step were done before the resume
                known = journal.replay(f"log-probs of {len(rows)} rows in their update")
                scored(experience.rows.like(known))
            steps.append(journal.replay(f"an optimizer step of the {name}"))
            continue
        steps.append(model.step(experience.select(rows), loss_fn, **given))
        if journal is not None:
            journal.record(f"an optimizer step of the {name}", steps[-1])
    return merged(steps)


def _kept(journal: Journal | None, scored: Told, name: str) -> Told:
    def keep(stats: TokenStats) -> None:
        if journal is not None:
            journal.keep(name, stats)
        scored(stats)

    return keep


def merged(steps: Sequence[Metrics]) -> Metrics:
    """Merges the metrics of several optimizer steps: means over the steps that were taken, sums of
    counts, maxima of memory.
    """
    taken = [step for step in steps if not any(map(step.get, NOT_TAKEN))]
    averaged = taken or steps
    found: Metrics = {}
    for name in steps[0]:
        if name.startswith(COUNT) or name in ("optimizer_steps", *NOT_TAKEN):
            found[name] = sum(step.get(name, 0.0) for step in steps)
        elif name.startswith("memory_"):
            found[name] = max(step[name] for step in steps)
        else:
            found[name] = sum(step[name] for step in averaged) / len(averaged)
    return found
