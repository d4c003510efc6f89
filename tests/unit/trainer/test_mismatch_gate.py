"""Which tokens the gate looks at, and what it asks when none of them is the present policy's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.algorithms.mismatch import Gap
from rftmega.config import RolloutConfig
from rftmega.core.errors import GapExceeded
from rftmega.core.interfaces import OneProcess
from rftmega.core.types import Prompt, Rollout, Samples, Sampling, TokenStats
from rftmega.rollout.engines import ScriptedEngine
from rftmega.trainer.experience import collect, complete
from rftmega.trainer.logprob_mismatch.bundle import GapBundle
from rftmega.trainer.logprob_mismatch.causes import Limits, cause_of
from rftmega.trainer.logprob_mismatch.gate import LIMITS, GapGate, limits_of
from tests.rollouts import rollout_of

PROMPTS = [Prompt((i, i + 1)) for i in range(20)]


class Machinery:
    """Engine, policy and weights in one: both give every token the log-probability -1; to new
    answers the engine adds `off`.
    """

    def __init__(self) -> None:
        self.engine = self.weights = self.policy = self
        self.host = OneProcess()
        self.numerics = SimpleNamespace(
            dtype="float32", has_experts=False, is_main=True, agreed=lambda exceeded: exceeded
        )
        self.scripted = ScriptedEngine(
            RolloutConfig(max_response_tokens=5), vocabulary=50, stop_ids=[1]
        )
        self.pushed: list[int] = []
        self.asked: list[list[Prompt]] = []
        self.off = 0.0

    def push(self, *, version: int) -> dict[str, float]:
        self.pushed.append(version)
        self.scripted.load_weights([], version=version)
        return {}

    def checksums(self) -> list[Any]:
        return []

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> list[Rollout | None]:
        self.asked.append(list(prompts))
        found = self.scripted.generate(prompts, **how)
        off = [
            replace(each, logprobs=tuple(-1.0 + self.off for _ in each.token_ids)) for each in found
        ]
        return [rollout_of(prompt, each) for prompt, each in zip(prompts, off, strict=True)]

    def log_probs(self, rows: Any, *, temperature: float | None = None) -> Any:
        tokens = rows.padded().tokens
        return rows.like(TokenStats(torch.full(tokens[:, 1:].shape, -1.0), None))


def rollout(machinery: Machinery, *, version: int) -> Samples:
    machinery.scripted.load_weights([], version=version)
    completions = machinery.generate(PROMPTS, seeds=range(20), sampling=Sampling(1.0))
    machinery.asked.clear()
    return collect(
        PROMPTS, complete(completions), lambda *_: [{"reward": 0.0}] * 20, samples_per_prompt=1
    )


def gate(machinery: Machinery, folder: Path) -> GapGate:
    return GapGate(machinery, Limits(1e-3, 1e-4), folder, temperature=1.0, seed=0, config={})


def test_tokens_of_earlier_policies_are_not_looked_at(tmp_path: Path) -> None:
    machinery = Machinery()
    samples = rollout(machinery, version=3)
    assert samples.versions is not None
    for row in range(0, len(samples), 2):
        samples.versions[row].copy_(torch.where(samples.rows.mask[row], 2, -1))
        samples.behaviour_logp[row].sub_(5.0)
    old = machinery.log_probs(samples.rows).logp
    assert gate(machinery, tmp_path).check(samples, old, 3).largest == 0
    assert machinery.asked == [], "there were enough of the present policy's"
    samples.behaviour_logp[1].sub_(5.0)
    with pytest.raises(GapExceeded):
        gate(machinery, tmp_path).check(samples, old, 3)


def test_where_no_token_is_the_present_policys_eight_prompts_are_asked_after_a_push(
    tmp_path: Path,
) -> None:
    machinery = Machinery()
    samples = rollout(machinery, version=2)
    old = machinery.log_probs(samples.rows).logp
    found = gate(machinery, tmp_path).check(samples, old, 3)
    assert found.tokens > 0
    assert machinery.pushed == [3]
    assert machinery.asked == [PROMPTS[:8]]
    machinery.off = 0.5
    with pytest.raises(GapExceeded, match="in step 4 the 99.9th percentile of the gap is 0.5"):
        gate(machinery, tmp_path).check(samples, old, 3)


def test_where_caches_of_earlier_weights_are_kept_new_answers_alone_are_looked_at(
    tmp_path: Path,
) -> None:
    machinery = Machinery()
    samples = rollout(machinery, version=3)
    for row in range(len(samples)):
        samples.behaviour_logp[row].sub_(5.0)  # neither policy's
    old = machinery.log_probs(samples.rows).logp
    with pytest.raises(GapExceeded):
        gate(machinery, tmp_path).check(samples, old, 3)
    machinery.pushed.clear()
    machinery.asked.clear()
    keeping = GapGate(
        machinery, Limits(1e-3, 1e-4), tmp_path, temperature=1.0, seed=0, config={}, pushes=False, keeps_caches=True,
    )  # fmt: skip
    found = keeping.check(samples, old, 3)
    assert found.tokens > 0 and found.largest == 0
    assert (machinery.pushed, machinery.asked) == ([], [PROMPTS[:8]])
    machinery.off = 0.5
    with pytest.raises(GapExceeded):
        keeping.check(samples, old, 3)


def test_a_policy_that_drops_while_it_scores_is_named_before_another_push(tmp_path: Path) -> None:
    machinery = Machinery()
    samples = rollout(machinery, version=0)
    old = machinery.log_probs(samples.rows).logp
    plain, passes = machinery.log_probs, []

    def drawing(rows: Any, **how: Any) -> Any:
        passes.append(len(machinery.pushed))
        found = plain(rows, **how)
        if isinstance(found.logp, torch.Tensor):  # of the worst rows
            return TokenStats(found.logp + 0.1 * torch.rand(found.logp.shape), None)
        return found

    machinery.log_probs = drawing  # type: ignore[method-assign]
    for row in range(len(samples)):
        samples.behaviour_logp[row].add_(0.5)
    with pytest.raises(GapExceeded, match="Cause: chance: the trainer gives the same rows other"):
        gate(machinery, tmp_path).check(samples, old, 0)
    assert passes[:2] == [0, 0], "a push came before the rows were scored twice"
    kept = GapBundle.load(tmp_path / "step_000000")
    assert len(kept.evidence.rescored) == 2
    assert cause_of(kept.evidence, kept.limits).kind == "chance"


def test_a_policy_whose_numbers_depend_on_the_tokens_behind_is_named(tmp_path: Path) -> None:
    machinery = Machinery()
    samples = rollout(machinery, version=0)
    old = machinery.log_probs(samples.rows).logp
    plain, scored = machinery.log_probs, []

    def of_the_length(rows: Any, **how: Any) -> Any:
        found = plain(rows, **how)
        if len(rows) == 1:
            scored.append((rows.tokens.shape[1], int(rows.lengths[0]), rows.mask.shape[1]))
            found.logp[0, -1] = -0.5  # of the last token alone, as the engine has it
        return found

    machinery.log_probs = of_the_length  # type: ignore[method-assign]
    for row in range(len(samples)):
        samples.behaviour_logp[row].sub_(0.5)
        samples.behaviour_logp[row][1] = -0.5  # the first token of each completion
    with pytest.raises(GapExceeded, match="Cause: batch: the trainer itself .* by up to 0.5, if"):
        gate(machinery, tmp_path).check(samples, old, 0)
    assert scored == [(3, 3, 2)] * 16
    kept = GapBundle.load(tmp_path / "step_000000")
    assert kept.evidence.alone_logp is not None
    assert cause_of(kept.evidence, kept.limits).kind == "batch"


def test_all_processes_stop_where_one_finds_the_gap_too_large(tmp_path: Path) -> None:
    machinery = Machinery()
    samples = rollout(machinery, version=0)
    machinery.numerics.agreed = lambda exceeded: True  # another's answer
    with pytest.raises(GapExceeded):
        gate(machinery, tmp_path).check(samples, machinery.log_probs(samples.rows).logp, 0)


def test_limits_that_are_not_given_are_those_of_the_dtype() -> None:
    assert limits_of("float32") == Limits(1e-3, 1e-4)
    assert limits_of("bfloat16") == LIMITS["bfloat16"]
    assert limits_of("bfloat16", percentile=0.2) == Limits(0.2, LIMITS["bfloat16"].mean)
    assert limits_of("float32", mean=0.3) == Limits(1e-3, 0.3)


def test_rounding_of_a_published_model_in_bfloat16_stays_within_the_default_limits() -> None:
    """SmolLM2-135M on an H200, vLLM against FSDP2 (docs/push.md)."""
    measured = Gap(largest=0.5, percentile=0.32, mean=0.043, median=0.02, tokens=8687, error=1.0)
    assert not limits_of("bfloat16").exceeded_by(measured)
    assert limits_of("bfloat16").exceeded_by(measured._replace(mean=0.2))
    assert limits_of("bfloat16").exceeded_by(measured._replace(percentile=1.3))
