"""Computes how far a student's distribution is from those of its teachers, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.models.kernels.chunked_head import Head
from rftmega.models.kernels.linear_buckets import largest_buckets, linear_buckets
from rftmega.models.kernels.linear_divergence import DivergenceKind, linear_divergence, log_average
from rftmega.models.kernels.linear_log_probs import VocabularyShard


@dataclass(frozen=True, slots=True)
class TeacherTerm:
    """TeacherTerm describes the distillation term of one teacher."""

    divergence: DivergenceKind
    # the rows of the teacher's LM head for the token ids of the student's shard on this process;
    # None if the divergence is not over the full vocabulary, or if this process has no LM head
    head: Head | None = None
    vocabulary: int = 0  # token ids that both models have, for the whole vocabulary

    def to(self, where: torch.device) -> "TeacherTerm":
        """Returns the term with its head on a device."""
        if self.head is None:
            return self
        tensors = [None if x is None else x.to(where) for x in self.head.tensors]
        return TeacherTerm(self.divergence, self.head.with_tensors(tensors), self.vocabulary)


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """TaughtRows holds a teacher's scores of a micro-batch's rows, in any place."""

    term: TeacherTerm
    scores: TeacherScores

    def on(self, where: torch.device, mask: Tensor, *, only: bool) -> "TaughtTokens":
        """Copies the scores of the tokens in `mask` to the device `where`. `mask`: [B, T] on the
        host; `only`: whether the LM head is computed for the tokens of `mask` alone.
        """
        flat = {
            name: column.flat.to(where, non_blocking=True)
            for name, column in self.scores.columns().items()
        }
        index = self.scores.index_of(mask).to(where, non_blocking=True)
        every = only and bool(self.scores.taught.all()) and bool(mask.any())
        return TaughtTokens(self.term, index, every, flat)


@dataclass(frozen=True, slots=True)
class TaughtTokens:
    """TaughtTokens holds a teacher's scores of a micro-batch's tokens on the device."""

    term: TeacherTerm
    index: Tensor  # see `TeacherScores.index_of`
    every: bool  # whether all tokens whose LM head is computed are taught, except filler
    columns: dict[str, Tensor]  # [taught tokens, ...]

    def of(self, slots: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns the positions among `slots` [N] (places in the micro-batch's grid) that are
        taught, None for all, and the scores of these.
        """
        numbers, held = self.index[slots], None
        if self.every:
            numbers = numbers.clamp(min=0)  # filler, whose result is dropped
        else:
            held = (numbers >= 0).nonzero()[:, 0]
            numbers = numbers[held]
        return held, {name: column[numbers] for name, column in self.columns.items()}


def teacher_terms(
    taught: Sequence[TaughtTokens],
    hidden_NH: Tensor,
    head: Head,
    logp_N: Tensor,
    slots_N: Tensor,
    temperature: float | Tensor,
    shard: VocabularyShard,
) -> Tensor:
    """Returns the divergence of the student's distribution from each teacher's, [N, teachers]
    float32, 0 for tokens that a teacher does not teach; differentiable like `linear_divergence`.

    `hidden_NH`, `head`, `logp_N`: the student's hidden states, LM head and log-probs of the
    sampled tokens; `slots_N`: each token's place in the micro-batch's grid.
    """
    found = []
    for each in taught:
        held, scores = each.of(slots_N)
        own = _Student(hidden_NH, head, logp_N, temperature, shard).of(held)
        value = own.compared(each.term, scores)
        if held is not None:
            value = value.new_zeros(len(slots_N)).index_put((held,), value)
        found.append(value)
    return torch.stack(found, -1)


def teacher_numbers(
    asked: TeacherRequest,
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    temperature: float | Tensor,
    shard: VocabularyShard,
) -> dict[str, Tensor]:
    """Returns the numbers of a teacher that `asked` names, [N, ...], from its hidden states and LM
    head.
    """
    own = linear_buckets(hidden_NH, head, targets_N[:, None], temperature, shard)
    found = {"logp": own[:, 0]}
    if asked.vocabulary == "full":
        found["hidden"] = hidden_NH
    if asked.vocabulary == "top_k":
        ids, found["buckets"] = largest_buckets(hidden_NH, head, asked.k, temperature, shard)
        found["ids"] = ids.to(torch.int32)
    return found


@dataclass(frozen=True, slots=True)
class _Student:
    """_Student holds the student's arguments of `teacher_terms` for some of the tokens."""

    hidden: Tensor
    head: Head
    logp: Tensor
    temperature: float | Tensor
    shard: VocabularyShard

    def of(self, held: Tensor | None) -> "_Student":
        """Returns the tokens at `held`; None: all."""
        if held is None:
            return self
        head, temperature = self.head, self.temperature
        if head.pair is not None:
            head = head._replace(pair=(head.pair[0].index_select(0, held), head.pair[1]))
        if isinstance(temperature, Tensor) and temperature.dim():
            temperature = temperature[held]
        hidden = self.hidden.index_select(0, held)
        return _Student(hidden, head, self.logp[held], temperature, self.shard)

    def compared(self, term: TeacherTerm, scores: dict[str, Tensor]) -> Tensor:
        """Returns the divergence from a teacher's `scores` of the same tokens, [N]."""
        if "hidden" in scores:
            assert term.head is not None, "the last stage has the teacher's LM head"
            shard = self.shard
            real = max(0, min(shard.real, term.vocabulary - shard.first))
            return linear_divergence(
                self.hidden,
                scores["hidden"],
                self.head,
                term.head,
                term.divergence,
                self.temperature,
                shard._replace(real=real),
            )
        if "buckets" in scores:
            ids = scores["ids"].long()
            own = linear_buckets(self.hidden, self.head, ids, self.temperature, self.shard)
            return bucket_divergence(own, scores["buckets"], term.divergence)
        return sampled_divergence(self.logp, scores["logp"], term.divergence)


def bucket_divergence(log_p: Tensor, log_q: Tensor, chosen: DivergenceKind) -> Tensor:
    """Returns the divergence [N] between distributions over buckets, of student and teacher, whose
    log-probs are `log_p` and `log_q` [N, K + 1]. It is at most that over all tokens.
    """
    p, q = log_p.exp(), log_q.exp()
    if chosen.name == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    if chosen.name == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_m = log_average(log_p, log_q, chosen.beta)
    of_teacher = (q * (log_q - log_m)).sum(-1)
    return chosen.beta * of_teacher + (1 - chosen.beta) * (p * (log_p - log_m)).sum(-1)


def sampled_divergence(logp: Tensor, teacher_logp: Tensor, chosen: DivergenceKind) -> Tensor:
    """Returns an estimate [N] of the divergence from one sampled token per position, whose gradient
    is that of the divergence on average over tokens that the student sampled.

    reverse_kl: the square of the log-ratio, halved (k2, see `algorithms.kl`); forward_kl: the
    log-ratio weighted by q / p, a large variance where the student's probability is small.
    """
    delta = logp - teacher_logp
    if chosen.name == "reverse_kl":
        return delta.square() / 2
    if chosen.name == "forward_kl":
        return -(-delta.detach()).exp() * delta
    raise ValueError("A Jensen-Shannon divergence needs more than the sampled token.")
