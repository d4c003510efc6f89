"""GapGate stops a run with a log-prob mismatch between engine and trainer before the policy trains
on the affected completions.

A weight sync can succeed and leave the engine with wrong weights: its completions are then
off-policy, and an importance weight hides the error.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.algorithms.mismatch import Gap, gaps_of, log_prob_gap
from rftmega.core.errors import EngineError, GapExceeded
from rftmega.core.interfaces import Machinery
from rftmega.core.ragged import Ragged
from rftmega.core.sampling_seeds import sampling_seed
from rftmega.core.types import Prompt, Rollout, Rows, Samples, Sampling
from rftmega.trainer.experience.samples import collect, complete
from rftmega.trainer.logprob_mismatch.bundle import GapBundle, rows_under_other_prompts
from rftmega.trainer.logprob_mismatch.causes import (
    Evidence,
    Limits,
    cause_of,
    matches,
    worst_rows,
    worst_tokens,
)

# Upper bounds for a correct engine, by the dtype of the forward pass; measured in docs/push.md.
LIMITS = {
    "float32": Limits(1e-3, 1e-4),
    "bfloat16": Limits(1.2, 0.15),
    "fp8": Limits(2.4, 0.4),  # the engine's, whatever the trainer's
}
WORST = 16  # rows that are examined and saved
PROBES = 8  # prompts that are sampled again after another weight sync
# no regular completion has this sample number, so probes draw seeds of their own
PROBE_SAMPLE = 1 << 20


def chosen_by(samples: Samples[Ragged], step: int) -> Ragged:
    """Returns a mask that is True for the response tokens sampled by the policy of `step`."""
    mask = samples.rows.mask
    if samples.versions is None:
        return mask
    return mask.with_values(mask.flat & (samples.versions.flat == step))


def gap_of(samples: Samples[Ragged], old_logp: Ragged, mask: Ragged) -> Gap:
    """Returns the log-prob mismatch between engine and trainer over the tokens in the mask;
    `old_logp`: the trainer's log-probs.
    """
    return log_prob_gap(samples.behaviour_logp.flat, old_logp.flat, mask.flat)


def limits_of(dtype: str, *, percentile: float = 0.0, mean: float = 0.0) -> Limits:
    """Returns the limits `percentile` and `mean`; a limit of 0 is replaced by the default for
    `dtype`.
    """
    usual = LIMITS[dtype]
    return Limits(percentile or usual.percentile, mean or usual.mean)


class GapGate:
    """GapGate compares the log-probs of engine and trainer; call `check` with every scored rollout
    batch, on every process.
    """

    def __init__(
        self,
        machinery: Machinery,
        limits: Limits,
        folder: Path,
        *,
        temperature: float,
        seed: int,
        config: dict[str, Any],
        pushes: bool = True,
        keeps_caches: bool = False,
    ):
        """`machinery`: the run's engine, weight sync and models. `folder`: folder in which a bundle
        (the worst rows and the evidence) is saved if the mismatch is too large, together with
        `config`. `temperature`, `seed`: for sampling new completions. `pushes`: sync weights before
        requesting new completions; False if every step requests completions right after a weight
        sync. `keeps_caches`: the engine's cached keys and values may stem from earlier weights, so
        only new completions are compared.
        """
        self.pushes, self.keeps_caches = pushes, keeps_caches
        self.machinery, self.limits, self.folder = machinery, limits, folder
        self.temperature, self.seed, self.config = temperature, seed, config

    def check(self, samples: Samples[Ragged], old_logp: Ragged, step: int) -> Gap:
        """Returns the mismatch over the tokens sampled by the policy of `step`. If there are no
        such tokens, or `keeps_caches` is set, returns the mismatch over new completions.

        `old_logp`: the trainer's log-probs. Raises GapExceeded on every process if any process
        finds the mismatch too large.
        """
        once = self.machinery.host.once
        if not self.keeps_caches:
            gap = once(lambda: gap_of(samples, old_logp, chosen_by(samples, step)))
            if gap.tokens:
                self._judge(samples, old_logp, gap, step)
                return gap
        asked, logp = self._ask_again(samples.prompts, step, push=self.pushes)
        gap = gap_of(asked, logp, asked.rows.mask)
        self._judge(asked, logp, gap, step)
        return gap

    def _judge(self, samples: Samples[Ragged], old_logp: Ragged, gap: Gap, step: int) -> None:
        if self.machinery.numerics.agreed(self.limits.exceeded_by(gap)):
            raise GapExceeded(self._explained(samples, old_logp, gap, step))

    def _ask_again(
        self, prompts: Sequence[Prompt], step: int, *, push: bool = True
    ) -> tuple[Samples[Ragged], Ragged]:
        """Requests new completions of a few of the prompts, after a weight sync if `push` is True.
        Returns them with the trainer's log-probs.
        """
        asked = list({prompt.token_ids: prompt for prompt in prompts}.values())[:PROBES]
        if push:
            self.machinery.weights.push(version=step)
        seeds = [sampling_seed(self.seed, prompt.task, PROBE_SAMPLE) for prompt in asked]
        found = self.machinery.engine.generate(
            asked, seeds=seeds, sampling=Sampling(self.temperature)
        )
        samples = collect(asked, complete(found), _unscored, samples_per_prompt=1)
        return samples, self.machinery.policy.log_probs(samples.rows).logp

    def _explained(self, samples: Samples[Ragged], old_logp: Ragged, gap: Gap, step: int) -> str:
        """Diagnoses the cause of a mismatch `gap` that is too large, saves the evidence as a
        bundle, and returns an error message with the cause and the bundle's folder.
        """
        bundle = self._looked_at(samples, old_logp, gap, step)
        cause = cause_of(bundle.evidence, self.limits)
        folder = self.folder / f"step_{step:06d}"
        if self.machinery.numerics.is_main:
            bundle.save(folder)
        self.machinery.numerics.agreed(False)  # wait until the bundle is written
        return (
            f"Engine and trainer give other log-probabilities to the same tokens: in step {step + 1} the 99.9th percentile of "
            f"the gap is {gap.percentile:.2g} (rollout.max_logprob_gap={self.limits.percentile:g}), its mean {gap.mean:.2g} "
            f"(rollout.mean_logprob_gap={self.limits.mean:g}), over {gap.tokens} tokens. Cause: {cause.kind}: {cause.why}. "
            f"Nothing was learnt from these completions. What was looked at is in {folder}; `rftmega replay {folder}` shows it."
        )

    def _looked_at(
        self, samples: Samples[Ragged], old_logp: Ragged, gap: Gap, step: int
    ) -> GapBundle:
        checksums = self.machinery.weights.checksums()  # before another push makes new ones
        mask = chosen_by(samples, step)
        gaps = gaps_of(samples.behaviour_logp.flat, old_logp.flat, mask.flat)
        index = worst_rows(samples.behaviour_logp, old_logp, mask, WORST)
        worst = samples.select(index).padded()
        rows, versions = worst.rows, worst.versions
        score = self.machinery.policy.log_probs
        rescored = (score(rows).logp, score(rows).logp)  # before another push, like the first
        own_logp, own_mask = old_logp.select(index).padded(), mask.select(index).padded()
        cuts = worst_tokens(worst.behaviour_logp, own_logp, own_mask) + 2  # a target and its input
        alone = self._alone(rows, cuts, own_logp)
        evidence = Evidence(
            whole=gap,
            share_beyond=(gaps > self.limits.percentile).double().mean().item(),
            mask=own_mask,
            behaviour_logp=worst.behaviour_logp,
            old_logp=own_logp,
            untempered_logp=score(rows, temperature=1.0).logp if self.temperature != 1.0 else None,
            other_prompt=self._other_prompt(worst),
            after_push=self._gap_after_push(samples.prompts, step),
            checksums=checksums,
            has_experts=self.machinery.numerics.has_experts,
            rescored=rescored,
            alone_logp=alone,
        )
        return GapBundle(
            step=step,
            temperature=self.temperature,
            dtype=self.machinery.numerics.dtype,
            limits=self.limits,
            rows=rows,
            versions=torch.full_like(rows.tokens[:, 1:], step)
            if versions is None
            else versions.long(),
            evidence=evidence,
            config=self.config,
        )

    def _alone(self, rows: Rows, cuts: Tensor, logp: Tensor) -> Tensor | None:
        """Returns the trainer's log-probs of `rows` [B, T], each scored by itself and without its
        tokens from `cuts` [B] on, where they are those of `logp`. None for rows with images.
        """
        if rows.images is not None:
            return None
        found = logp.clone()
        for row, kept in enumerate(torch.minimum(cuts, rows.lengths).tolist()):
            cut = Rows(
                rows.tokens[row : row + 1, :kept],
                rows.prompt_lengths[row : row + 1].clamp(max=kept),
                torch.tensor([kept]),
                rows.mask[row : row + 1, : kept - 1],
            )
            found[row, : kept - 1] = self.machinery.policy.log_probs(cut).logp[0]
        return found

    def _other_prompt(self, worst: Samples) -> Tensor:
        """Looks for completions that the engine put at the wrong prompt. Returns [B] int64: for
        each row of `worst` the row under whose prompt the trainer's log-probs match the engine's,
        -1 if no other prompt matches.
        """
        found = torch.full((len(worst),), -1)
        rows, pairs = rows_under_other_prompts(worst.rows)
        if not len(rows) or worst.rows.images is not None:  # each belongs to its prompt
            return found
        logp = self.machinery.policy.log_probs(rows).logp
        for number, (completion, prompt) in enumerate(pairs.tolist()):
            engines = worst.behaviour_logp[completion][worst.rows.mask[completion]]
            trainers = logp[number][rows.mask[number]]
            if matches(engines, trainers, torch.ones_like(engines, dtype=torch.bool), self.limits):
                found[completion] = prompt
        return found

    def _gap_after_push(self, prompts: Sequence[Prompt], step: int) -> Gap | None:
        try:
            samples, logp = self._ask_again(prompts, step)
        except EngineError:  # the engine has another fault as well; report the evidence so far
            return None
        return gap_of(samples, logp, samples.rows.mask)


def _unscored(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": 0.0} for _ in rollouts]
