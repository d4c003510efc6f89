"""Diagnosis of a log-prob mismatch between engine and trainer: derives a single cause from the
evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.algorithms.mismatch import Gap, gaps_of
from rftmega.core.ragged import Ragged
from rftmega.core.types import SliceChecksums

FEW = 0.05  # share of tokens: near-ties between experts are rare
NAMED = 5  # tensors in a message
ROUNDING = 1e-4  # nats: more than rounding in float32 changes a log-prob
SAME = 0.1  # of a mismatch: so close are log-probs that explain it


class Limits(NamedTuple):
    """Limits of the log-prob mismatch between engine and trainer, in nats; a larger mismatch stops
    the run.
    """

    percentile: float  # the 99.9th
    mean: float

    def exceeded_by(self, gap: Gap) -> bool:
        return not (gap.percentile <= self.percentile and gap.mean <= self.mean)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence holds measurements taken after the mismatch exceeded the limits. Tensors belong to
    the rows with the largest mismatch, [B, T], aligned with targets.
    """

    whole: Gap  # of all tokens
    share_beyond: float  # share of all tokens with a mismatch above the limit
    mask: Tensor  # True where the target is a response token
    behaviour_logp: Tensor  # by the engine
    old_logp: Tensor  # by the trainer
    # by the trainer at temperature 1; None if the rollout used temperature 1
    untempered_logp: Tensor | None
    # [B] int64: the row under whose prompt the trainer's log-probs of this completion match the
    # engine's; -1: none
    other_prompt: Tensor
    # of new completions, after another weight sync; None: there are none
    after_push: Gap | None
    checksums: Sequence[SliceChecksums]  # of the weight sync before the completions
    has_experts: bool
    # by the trainer, of the same rows, in two more scoring passes
    rescored: tuple[Tensor, ...] = ()
    # by the trainer, of each row by itself, without what is behind the token with the largest
    # mismatch, where it is old_logp; None: not known
    alone_logp: Tensor | None = None


class Cause(NamedTuple):
    """Cause of a mismatch: `kind` is chance, weights, tokens, sampling transform, batch, experts'
    routes or numbers; `why` is the explanation for the user.
    """

    kind: str
    why: str


def cause_of(evidence: Evidence, limits: Limits) -> Cause:
    """Returns the cause of the mismatch: the first one that the evidence supports; causes that
    would explain other findings as well are tested first.
    """
    for look in (_chance, _weights, _tokens, _transform, _batch, _stale, _routes):
        if found := look(evidence, limits):
            return found
    return _numbers(evidence, limits)


def matches(one: Tensor, other: Tensor, mask: Tensor, limits: Limits) -> bool:
    """Returns whether two tensors of log-probs, [B, T], are equal within the limits at the tokens
    of the mask.
    """
    gap = gaps_of(one, other, mask)
    return (
        len(gap) > 0 and float(gap.mean()) <= limits.mean and float(gap.max()) <= limits.percentile
    )


def _chance(evidence: Evidence, limits: Limits) -> Cause | None:
    """Returns the cause "chance" if scoring passes of the trainer over the same rows differ, since
    no other diagnosis is valid then; None if they agree.
    """
    if not evidence.rescored:
        return None
    first, *others = evidence.rescored
    for again in others:
        if _disagree(first, again, evidence, limits):
            return Cause(
                "chance",
                "the trainer gives the same rows other log-probabilities each time, by up to "
                f"{_largest(first, again, evidence)}: its forward pass draws random numbers (dropout, noise in a router) or a "
                "kernel of it is not deterministic. "
                "So the gap says nothing of weights and pushes",
            )
    if _disagree(first, evidence.old_logp, evidence, limits):
        return Cause(
            "chance",
            "two scoring passes of the trainer agree, and the pass that the update learns in gives the same rows other "
            f"log-probabilities, by up to {_largest(first, evidence.old_logp, evidence)}: it drops something (model.dropout), "
            "adds noise, or its weights were changed in between. So the gap says nothing of weights and pushes",
        )
    return None


def _disagree(one: Tensor, other: Tensor, evidence: Evidence, limits: Limits) -> bool:
    """Returns whether two scoring passes differ by more than near-ties between experts of a few
    tokens explain.
    """
    beyond = (gaps_of(one, other, evidence.mask) > limits.percentile).double().mean().item()
    few = evidence.has_experts and beyond <= FEW
    return not few and not matches(one, other, evidence.mask, limits)


def _largest(one: Tensor, other: Tensor, evidence: Evidence) -> str:
    return f"{float(gaps_of(one, other, evidence.mask).max()):.2g}"


def _weights(evidence: Evidence, limits: Limits) -> Cause | None:
    wrong = [each for each in evidence.checksums if not each.intact]
    if not wrong:
        return None
    lost = [each for each in wrong if each.received is None]
    stale = [each for each in wrong if each.held != each.sent]
    names = list(dict.fromkeys(each.name for each in wrong))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    how = (
        "did not arrive"
        if lost
        else "were sent with other values than the trainer has"
        if stale
        else "arrived changed"
    )
    listed = ", ".join(f"{name}[{_bounds(name, wrong)}]" for name in names[:NAMED])
    return Cause("weights", f"{len(names)} tensor(s) {how}: {listed}{more}")


def _bounds(name: str, wrong: Sequence[SliceChecksums]) -> str:
    """Returns the smallest index range that covers all corrupt slices of the tensor `name`, in
    Python's slice syntax. `wrong`: the corrupt slices of all tensors.
    """
    edges = zip(*(each.box for each in wrong if each.name == name), strict=True)
    return ", ".join(
        f"{min(start for start, _ in edge)}:{max(stop for _, stop in edge)}" for edge in edges
    )


def _tokens(evidence: Evidence, limits: Limits) -> Cause | None:
    # a short completion of a correct engine may match another prompt: rounding, within the limits
    gap = (evidence.behaviour_logp - evidence.old_logp).abs().where(evidence.mask, 0)
    beyond = ~(gap.amax(-1) <= limits.percentile)  # NaN too
    found = (evidence.other_prompt >= 0) & beyond
    if bool(found.any()):
        row = int(found.nonzero()[0])
        return Cause(
            "tokens",
            f"{int(found.sum())} of the {len(found)} worst completions have the engine's log-probabilities under another prompt "
            f"(completion {row} under the prompt of {int(evidence.other_prompt[row])}): completions were put at the wrong "
            "prompts",
        )
    for shift, said in ((1, "the token before"), (-1, "the token after")):
        both = evidence.mask & evidence.mask.roll(shift, -1)
        if matches(evidence.behaviour_logp, evidence.old_logp.roll(shift, -1), both, limits):
            return Cause(
                "tokens",
                f"the engine's log-probability of each token is the trainer's of {said}: they are misaligned",
            )
    return None


def _transform(evidence: Evidence, limits: Limits) -> Cause | None:
    mask = evidence.mask
    if evidence.untempered_logp is not None and matches(
        evidence.behaviour_logp, evidence.untempered_logp, mask, limits
    ):
        return Cause(
            "sampling transform",
            "the engine's log-probabilities are those of temperature 1: it reports them before it applies rollout.temperature",
        )
    above = (evidence.behaviour_logp - evidence.old_logp)[mask]
    if evidence.share_beyond > FEW and len(above) and float(above.min()) >= -limits.percentile:
        return Cause(
            "sampling transform",
            "the engine's log-probabilities are nowhere lower than the trainer's: it cuts its distribution off (top-p, top-k, "
            "min-p) and renormalises what is left, which the trainer does not",
        )
    return None


def _batch(evidence: Evidence, limits: Limits) -> Cause | None:
    """Returns the cause "batch" if the trainer gives tokens other log-probs when their row is scored
    by itself and without the tokens behind them, as an engine computes it: many other ones, or the
    engine's where the mismatch is largest.
    """
    alone, batched = evidence.alone_logp, evidence.old_logp
    if alone is None:
        return None
    coarse = Limits(max(limits.percentile, ROUNDING), max(limits.mean, ROUNDING))
    place = worst_tokens(evidence.behaviour_logp, batched, evidence.mask)[:, None]
    theirs, ours, own = (
        each.double().gather(1, place) for each in (evidence.behaviour_logp, batched, alone)
    )
    off = (theirs - ours).abs()
    beyond = off > coarse.percentile
    explained = beyond & ((theirs - own).abs() <= SAME * off)
    mostly = 2 * int(explained.sum()) > int(beyond.sum())
    if not mostly and not _disagree(alone, batched, evidence, coarse):
        return None
    engines = ", which are the engine's" if mostly else ""
    return Cause(
        "batch",
        f"the trainer itself gives tokens other log-probabilities, by up to {_largest(alone, batched, evidence)}, if their row "
        f"is scored by itself and without the tokens behind them{engines}. So the model's "
        "own numbers depend on the batch, and the gap says nothing of weights and pushes: experts, or tokens to attend to, that "
        "have equal scores are chosen by chance of the kernel (a model that was hardly trained has many), or tokens see later "
        "ones. `rftmega check` compares passes of transformers' model. If it is ties, raise rollout.max_logprob_gap and "
        "rollout.mean_logprob_gap",
    )


def worst_tokens(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Returns [B] int64: the token of the mask with the largest mismatch in each row of log-probs
    [B, T]; 0 in a row without such tokens.
    """
    gap = (behaviour_logp.double() - old_logp.double()).abs().nan_to_num(torch.inf, torch.inf)
    return gap.where(mask, -1.0).argmax(1)


def _stale(evidence: Evidence, limits: Limits) -> Cause | None:
    after = evidence.after_push
    if (
        evidence.share_beyond > FEW
        and after is not None
        and after.tokens
        and not limits.exceeded_by(after)
    ):
        return Cause(
            "weights",
            "every slice arrived as the trainer holds it, and yet another push of the same weights mends it: the engine's own "
            "were changed, or not used, after they had arrived (a sleep, a repacking, a prefix cache of earlier weights)",
        )
    return None


def _routes(evidence: Evidence, limits: Limits) -> Cause | None:
    if (
        evidence.has_experts
        and evidence.share_beyond <= FEW
        and evidence.whole.median <= limits.mean
    ):
        return Cause(
            "experts' routes",
            f"{evidence.share_beyond:.2%} of the tokens are off and half of all within {evidence.whole.median:.1e}: where two "
            "experts are nearly tied for a token, engine and trainer choose different ones",
        )
    return None


def _numbers(evidence: Evidence, limits: Limits) -> Cause:
    if evidence.whole.mean > 10 * limits.mean:
        return Cause(
            "numbers",
            "every slice arrived as the trainer holds it, another push changes nothing, and no shift, prompt or temperature "
            "explains it: the engine computes something else from these weights (how it repacks them after loading, a kernel, "
            "an architecture that one of the two gets wrong)",
        )
    return Cause(
        "numbers",
        "rounding: nothing else differs. Where this dtype and these kernels can do no better, raise the limits to what "
        "logprob_gap_p999 and logprob_gap_mean of a good run show",
    )


def worst_rows(behaviour_logp: Ragged, old_logp: Ragged, mask: Ragged, most: int) -> Tensor:
    """Returns the indices of at most `most` rows ([n] int64), sorted by the mean mismatch between
    engine (`behaviour_logp`) and trainer (`old_logp`) over the tokens in `mask`, the largest first.

    Rows without tokens in the mask come last.
    """
    largest = torch.finfo(torch.float64).max / int(mask.lengths.max())
    chosen = mask.flat
    gap = torch.zeros(len(chosen), dtype=torch.float64)
    gap[chosen] = gaps_of(behaviour_logp.flat, old_logp.flat, chosen).clamp(max=largest)
    mean = mask.with_values(gap).sums() / mask.sums().clamp(min=1)
    return mean.argsort(descending=True, stable=True)[:most]
