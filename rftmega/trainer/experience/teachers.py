"""Asks teachers about the rows of a step: which rows each teaches, and with which prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rftmega.algorithms.gae import discounted_returns
from rftmega.config.options.teachers import Teacher
from rftmega.core.interfaces import Host, TeacherScorer
from rftmega.core.ragged import Ragged, by_rows
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import Experience, Metrics, Prompt, Rows, Samples


@dataclass(frozen=True, slots=True)
class AskedTeacher:
    """AskedTeacher is a teacher with its options and its name in metrics."""

    number: int  # in algorithm.teachers
    name: str
    chosen: Teacher
    scorer: TeacherScorer

    @property
    def in_loss(self) -> bool:
        return self.chosen.signal == "loss"

    def scores(self, samples: Samples[Ragged], mask: Ragged, host: Host) -> TeacherScores:
        """Returns the teacher's numbers for the tokens of `mask`, in the rows that it teaches."""
        return self._told(*host.once(lambda: _asked_rows(self.number, self.chosen, samples, mask)))

    def of_rows(self, rows: Rows[Ragged]) -> TeacherScores:
        """Returns the teacher's numbers for the tokens of the mask of rows that nobody sampled."""
        taught = rows.mask.sums() > 0
        return self._told(replace(rows, routes=None).select(taught.nonzero()[:, 0]), taught)

    def again(self, experience: Experience[Ragged], host: Host) -> TeacherScores:
        """Returns the teacher's present numbers for rows of earlier steps, of those that it taught
        then.
        """
        return self._told(*host.once(lambda: _rows_asked_again(self.name, experience)))

    def _told(self, rows: Rows[Ragged], taught: Tensor) -> TeacherScores:
        """Returns the scores of `rows`, those that are True in `taught` [B], as scores of B rows."""
        request = TeacherRequest(self.chosen.vocabulary, self.chosen.top_k)
        return _of_all_rows(self.scorer.teach(rows, request), taught)


def _of_all_rows(found: TeacherScores, taught: Tensor) -> TeacherScores:
    """Returns the scores of the rows that are True in `taught` [B] as scores of all B rows."""

    def spread(column: Ragged) -> Ragged:
        lengths = torch.zeros(len(taught), dtype=column.lengths.dtype)
        lengths[taught] = column.lengths
        return Ragged.packed(column.flat, lengths)

    columns = {name: spread(column) for name, column in found.columns().items()}
    return TeacherScores(taught, **columns)


def _asked_rows(
    number: int, chosen: Teacher, samples: Samples[Ragged], mask: Ragged
) -> tuple[Rows[Ragged], Tensor]:
    """Returns the rows that teacher `number` is asked about, with its own prompts, and which rows of
    `samples` they are, [B] bool.
    """
    taught = _chosen_rows(number, samples) & (mask.sums() > 0)
    rows = replace(samples.rows, mask=mask, routes=None)
    if not chosen.prompt:
        return rows.select(taught.nonzero()[:, 0]), taught
    for row, prompt in enumerate(samples.prompts):
        taught[row] &= _begins_with(rows.tokens[row], prompt.token_ids)
    places = taught.nonzero()[:, 0]
    own = [
        (prompt, _own(prompt, number))
        for prompt in [samples.prompts[row] for row in places.tolist()]
    ]
    return _with_prompts(rows.select(places), own), taught


def _rows_asked_again(name: str, experience: Experience[Ragged]) -> tuple[Rows[Ragged], Tensor]:
    """Returns the rows that teacher `name` taught, with its own prompts, and which rows of
    `experience` they are, [B] bool.
    """
    logp = experience.teacher_logp[name]
    taught = logp.with_values(~logp.flat.isnan()).sums() > 0
    places = taught.nonzero()[:, 0]
    rows = replace(experience.rows, routes=None).select(places)
    if name not in experience.teacher_prompts:
        return rows, taught
    prompts = experience.teacher_prompts[name].select(places)
    own = [
        (Prompt(tuple(tokens[:length].tolist())), tuple(prompt.tolist()))
        for tokens, length, prompt in zip(
            rows.tokens, rows.prompt_lengths.tolist(), prompts, strict=True
        )
    ]
    return _with_prompts(rows, own), taught


def prompts_of(number: int, samples: Samples[Ragged]) -> Ragged:
    """Returns the prompt of teacher `number` of each row as token ids; empty where it has none."""
    own = [prompt.teachers[number] if prompt.teachers else None for prompt in samples.prompts]
    ids = [() if taught is None else taught.token_ids for taught in own]
    return Ragged.of([torch.tensor(each, dtype=torch.int32) for each in ids])


def _own(prompt: Prompt, number: int) -> tuple[int, ...]:
    """Returns the prompt of teacher `number` as token ids."""
    taught = prompt.teachers[number]
    assert taught is not None, "rows that it does not teach are left out"
    return taught.token_ids


def _chosen_rows(number: int, samples: Samples[Ragged]) -> Tensor:
    """Returns [B] bool: the rows whose record says that teacher `number` teaches it, and whose gate
    is above the mean reward of their group.
    """
    sizes = torch.bincount(samples.group).clamp(min=1)
    totals = torch.zeros(len(sizes)).index_add(0, samples.group, samples.reward.float())
    means = (totals / sizes)[samples.group].tolist()
    found = [
        _is_taught(prompt, number, mean)
        for prompt, mean in zip(samples.prompts, means, strict=True)
    ]
    return torch.tensor(found, dtype=torch.bool)


def _is_taught(prompt: Prompt, number: int, mean: float) -> bool:
    if not prompt.teachers:
        return True
    taught = prompt.teachers[number]
    return taught is not None and (taught.gate is None or taught.gate > mean)


def _begins_with(tokens: Tensor, prompt: Sequence[int]) -> bool:
    """Returns whether a row begins with the prompt of its record; a later part of a rollout whose
    context was rewritten does not.
    """
    return tokens[: len(prompt)].tolist() == list(prompt)


def _with_prompts(
    rows: Rows[Ragged], own: Sequence[tuple[Prompt, tuple[int, ...]]]
) -> Rows[Ragged]:
    """Returns the rows with other prompts. `own`: of each row, its prompt and the teacher's prompt
    as token ids.
    """
    tokens, masks, lengths = [], [], []
    for row, (prompt, ids) in enumerate(own):
        before = len(prompt.token_ids)
        given = torch.tensor(ids, dtype=rows.tokens.values.dtype)
        tokens.append(torch.cat([given, rows.tokens[row][before:]]))
        own_mask = rows.mask[row][before - 1 :]  # target t is token t + 1
        masks.append(torch.cat([own_mask.new_zeros(len(ids) - 1), own_mask]))
        lengths.append(len(ids))
    if not own:
        return rows
    prompts = torch.tensor(lengths)
    made = Ragged.of(tokens)
    return Rows(made, prompts, made.lengths, Ragged.of(masks))


def advantage_of(chosen: Teacher, scores: TeacherScores, mask: Ragged, old_logp: Ragged) -> Ragged:
    """Returns what a teacher adds to the advantage of each token: its weight times the log-ratio of
    teacher and policy, summed with the discount over the later tokens of the row
    (arXiv:2306.08543, eq. 3, with the discount of a return); 0 for tokens that it does not teach.
    """
    assert scores.logp is not None
    taught = mask.flat & mask.spread(scores.taught)
    reward = torch.zeros_like(old_logp.flat)
    reward[taught] = chosen.weight * (scores.logp.flat - old_logp.flat[taught])
    rewards, marks = mask.with_values(reward), mask.with_values(taught)
    if not chosen.discount:
        return rewards
    return by_rows(
        lambda own, marked: discounted_returns(own, marked, chosen.discount), rewards, marks
    )


def logp_of(scores: TeacherScores, mask: Ragged) -> Ragged:
    """Returns the teacher's log-probs of all tokens, NaN for those that it does not teach."""
    assert scores.logp is not None
    taught = mask.flat & mask.spread(scores.taught)
    found = torch.full((len(taught),), torch.nan)
    found[taught] = scores.logp.flat
    return mask.with_values(found)


def log_ratios(experience: Experience[Ragged]) -> Metrics:
    """Returns for each teacher the mean over taught tokens of the log-ratio of policy and teacher
    before the update, an estimate of the reverse KL; 0 without taught tokens.
    """
    found = {}
    for name, logp in experience.teacher_logp.items():
        assert experience.old_logp is not None, "the update has computed it"
        ratio = (experience.old_logp.flat - logp.flat)[logp.flat.isfinite()]
        found[f"{name}_log_ratio"] = ratio.mean().item() if len(ratio) else 0.0
    return found
