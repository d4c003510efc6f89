"""Asks the teachers again about rows of earlier steps."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rftmega.core.interfaces import Host
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience
from rftmega.trainer.experience.teachers import AskedTeacher, advantage_of, logp_of


def with_every_teacher(
    rows: Experience[Ragged], teachers: Sequence[AskedTeacher]
) -> Experience[Ragged]:
    """Returns stored rows with the columns of every teacher; one of which they have none, since it
    came with a resume, did not teach them.
    """
    logp, prompts = dict(rows.teacher_logp), dict(rows.teacher_prompts)
    for each in teachers:
        asks = bool(each.chosen.prompt)
        if each.name not in logp or (asks and each.name not in prompts):
            logp[each.name] = rows.mask.with_values(torch.full((len(rows.mask.flat),), torch.nan))
            if asks:
                prompts[each.name] = no_prompts(len(rows))
    return replace(
        rows,
        teacher_logp={each.name: logp[each.name] for each in teachers},
        teacher_prompts={each.name: prompts[each.name] for each in teachers if each.chosen.prompt},
    )


def no_prompts(rows: int) -> Ragged:
    """Returns a teacher's prompts of rows that it does not teach, as token ids."""
    none = torch.zeros(rows, dtype=torch.int64)
    return Ragged.packed(torch.zeros(0, dtype=torch.int32), none)


def taught_again(
    rows: Experience[Ragged], old_logp: Ragged, teachers: Sequence[AskedTeacher], host: Host
) -> Experience[Ragged]:
    """Returns rows of earlier steps with what the teachers say of them now. `old_logp`: the present
    policy's log-probs of the rows, which still hold those of their own step.

    In the advantage, log-ratios of the teachers and the present policy replace those of then, since
    the gradient of a reverse KL at the present policy has its log-ratio.
    """
    if not teachers:
        return rows
    scores = [each.again(rows, host) for each in teachers]

    def change() -> Ragged:
        advantage = rows.advantage.flat.clone()
        for each, now in zip(teachers, scores, strict=True):
            if each.in_loss:
                continue
            assert now.logp is not None and rows.old_logp is not None
            told = rows.teacher_logp[each.name].flat[_taught_tokens(rows, now.taught)]
            then = replace(now, logp=now.logp.with_values(told))
            advantage += advantage_of(each.chosen, now, rows.mask, old_logp).flat
            advantage -= advantage_of(each.chosen, then, rows.mask, rows.old_logp).flat
        return rows.advantage.with_values(advantage)

    def log_probs() -> dict[str, Ragged]:
        named = zip(teachers, scores, strict=True)
        return {each.name: logp_of(own, rows.mask) for each, own in named}

    return replace(
        rows,
        advantage=host.once(change),
        teachers=tuple(own for each, own in zip(teachers, scores, strict=True) if each.in_loss),
        teacher_logp=host.once(log_probs),
    )


def _taught_tokens(rows: Experience[Ragged], taught: Tensor) -> Tensor:
    """Returns a mask over all tokens of the trained ones in the rows that are True in `taught`."""
    return rows.mask.flat & rows.mask.spread(taught)
