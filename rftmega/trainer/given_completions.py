"""GivenCompletions mixes completions of a data set into the experience that teachers train on."""

from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from rftmega.core.interfaces import Host
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Metrics, Rows, RowsOfRollouts, TokenStats
from rftmega.trainer.experience.maker import shares_of
from rftmega.trainer.experience.mixed import mixed_evenly
from rftmega.trainer.experience.replayed_teachers import no_prompts
from rftmega.trainer.experience.teachers import AskedTeacher, logp_of
from rftmega.trainer.ptx import Order


class PolicyAndReference(Protocol):
    def log_probs(self, rows: Rows[Ragged]) -> TokenStats[Ragged]: ...

    def reference_log_probs(self, rows: Rows[Ragged]) -> TokenStats[Ragged]: ...


class GivenCompletions:
    """GivenCompletions lets teachers train the policy on completions that others wrote, too: the
    off-policy part of GKD (arXiv:2306.13649, algorithm 1).

    Such a completion has no reward and an advantage of 0. The behaviour policy counts as the
    present one, so that its importance weight is 1. Only teachers whose divergence is in the loss
    teach it.
    """

    def __init__(
        self, policy: PolicyAndReference, order: Order, teachers: list[AskedTeacher], host: Host
    ):
        """`order`: batches of the data set's rows, one for each step. `host` stores the experience,
        one copy per host.
        """
        self.policy, self.order, self.teachers, self.host = policy, order, teachers, host
        self._step: int | None = None  # of the latest batch
        self._before = order.state()  # the position before it
        self._resumed = False

    def beside(
        self, experience: Experience[Ragged], step: int
    ) -> tuple[Experience[Ragged], Metrics]:
        """Returns the experience of step `step`, mixed evenly with the next batch of the data set,
        and metrics.
        """
        rows = self._rows(step)
        stats = self.policy.log_probs(rows)
        scores = [each.of_rows(rows) if each.in_loss else None for each in self.teachers]
        nothing = rows.mask.with_values(torch.full((len(rows.mask.flat),), torch.nan))
        columns: dict[str, Any] = {
            "old_logp": stats.logp,
            "behaviour_logp": stats.logp,
            "entropy": stats.entropy,
            # the update takes those that the log-probs have been computed with
            "routes": stats.routes if rows.routes is None else rows.routes,
            "versions": rows.mask.with_values(torch.where(rows.mask.flat, step, -1)),
            "teachers": tuple(own for own in scores if own is not None),
            "teacher_logp": {
                each.name: nothing if own is None else logp_of(own, rows.mask)
                for each, own in zip(self.teachers, scores, strict=True)
            },
        }
        if experience.reference_logp is not None:
            columns["reference_logp"] = self.policy.reference_log_probs(rows).logp
        found = _experience(rows, columns, experience)
        mixed = self.host.once(lambda: mixed_evenly([experience, found]))
        return mixed, {"given_completions": float(len(rows))}

    def _rows(self, step: int) -> Rows[Ragged]:
        """Returns the data set's rows for a step: after a resume within the step, those that the step
        had before.
        """
        if self._resumed and self._step is not None and step > self._step:
            next(iter(self.order))  # that step was completed
        self._resumed, self._step, self._before = False, step, self.order.state()
        return next(iter(self.order)).ragged()

    def state(self) -> dict[str, Any]:
        """Returns the latest step with a batch and the position in the data set before it, for a
        resume within or after this step.
        """
        return {"step": self._step, "order": self._before}

    def load_state(self, state: dict[str, Any]) -> None:
        self._step, self._before, self._resumed = state["step"], state["order"], True
        self.order.load_state(self._before)


def _experience(
    rows: Rows[Ragged], columns: dict[str, Any], like: Experience[Ragged]
) -> Experience[Ragged]:
    """Returns `rows` with these `columns`, and zeros in every other column that `like` has."""
    rollouts = RowsOfRollouts.of(None, len(rows))
    share, leads = shares_of(rollouts, rows.mask)
    known = {
        "tokens": rows.tokens,
        "prompt_lengths": rows.prompt_lengths,
        "lengths": rows.lengths,
        "mask": rows.mask,
        "images": rows.images,
        "rollout": rollouts.of_row,
        "share": share,
        "leads": leads,
        "teacher_prompts": dict.fromkeys(like.teacher_prompts, no_prompts(len(rows))),
        **columns,
    }
    zeros = torch.zeros(len(rows.mask.flat))
    for each in fields(Experience):
        value = getattr(like, each.name)
        if each.name in known:
            continue
        if isinstance(value, Ragged):
            known[each.name] = rows.mask.with_values(zeros.to(value.values.dtype))
        elif isinstance(value, Tensor):
            known[each.name] = value.new_zeros(len(rows))
    return Experience(**{"reference_logp": None, **known})
