"""An update computes the LM head for the tokens that are trained on alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.backends.fsdp import module
from rftmega.backends.megatron import forward
from rftmega.config import ParallelConfig
from rftmega.core.types import Experience, TokenLoss, TokenStats
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
# rows 1 and 3 have no response; row 1 has a micro-batch of its own
LENGTHS, PROMPTS = (30, 29, 12, 5, 16, 7), (24, 29, 3, 5, 15, 2)
ROWS = [[(37 * i + 11 * b) % 131 for i in range(length)] for b, length in enumerate(LENGTHS)]


def body(world: Any, folder: Path, parallel: ParallelConfig, backend: str) -> Any:
    """Returns the number of tokens of each LM head call of an update, and the largest difference of
    the statistics that its loss sees from those of a scoring pass, at trained and at other tokens.
    """
    policy = build_policy(
        folder, parallel, backend=backend, dtype="float32", token_cap=31, temperature=0.7
    )
    rows = rows_of(ROWS, list(PROMPTS))
    scored = policy.log_probs(rows.ragged())
    old = scored.logp.padded(width=rows.mask.shape[1])
    torch.manual_seed(0)
    experience = Experience(
        tokens=rows.tokens, prompt_lengths=rows.prompt_lengths, lengths=rows.lengths, mask=rows.mask,
        behaviour_logp=old, old_logp=old, reference_logp=None, advantage=torch.randn(old.shape) * rows.mask,
    )  # fmt: skip
    counts: list[int] = []
    gaps: list[tuple[float, float]] = []
    plain, entropies = policy_loss(entropy_coef=0.1), scored.entropy.padded(width=old.shape[1])

    def loss(stats: TokenStats, seen: Experience) -> TokenLoss:
        own = seen.mask
        near = (stats.logp - seen.old_logp).detach().abs()[own]
        outside = torch.cat([stats.logp.detach()[~own], stats.entropy.detach()[~own]])
        gaps.append((float(near.max()) if len(near) else 0.0, float(outside.abs().sum())))
        return plain(stats, seen)

    def counted(hidden: Any, *given: Any, **named: Any) -> Any:
        counts.append(len(hidden))
        return linear_stats(hidden, *given, **named)

    linear_stats = forward.linear_stats
    forward.linear_stats = module.linear_stats = counted
    try:
        metrics = policy.step(experience.ragged(), loss)
    finally:
        forward.linear_stats = module.linear_stats = linear_stats
    assert float(entropies.sum()) > 0
    return counts, gaps, metrics["grad_norm"], metrics["count"]


@pytest.mark.parametrize(
    ("processes", "parallel", "backend"),
    [
        (2, P(context=2), "megatron"),
        (2, P(), "fsdp"),
        pytest.param(1, P(), "megatron", marks=pytest.mark.ranks),
        pytest.param(2, P(tensor=2, sequence=True), "megatron", marks=pytest.mark.ranks),
        pytest.param(2, P(tensor=2), "fsdp", marks=pytest.mark.ranks),
    ],
)
def test_the_head_of_an_update_sees_trained_tokens_and_filler_alone(
    processes: int, parallel: ParallelConfig, backend: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    found = run_ranks(processes, body, folder, parallel, backend)
    trained = sum(length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True))
    copies = parallel.tensor
    calls = [count for counts, *_ in found for count in counts]
    assert trained * copies <= sum(calls) <= trained * copies + len(calls)  # one of filler at most
    for _, gaps, norm, count in found:
        assert max(near for near, _ in gaps) < 1e-5
        assert all(outside == 0 for _, outside in gaps)
        assert count == trained
        assert norm > 0
    norms = {round(norm, 5) for *_, norm, _ in found}
    assert len(norms) == 1
