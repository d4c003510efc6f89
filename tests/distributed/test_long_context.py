"""A row of up to 131,072 tokens through scoring and an update: results, and peak memory beside that
of the plan.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.parallel_state import get_global_memory_buffer
from transformers import AutoModelForCausalLM

from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Rows
from rftmega.run.planning import activations
from rftmega.run.planning.activations import Load
from rftmega.run.planning.memory import experience_bytes
from rftmega.run.planning.models import POLICY, models_of
from tests.allocations import most_bytes
from tests.distributed.test_plan import CLOSE, OF_A_CPU, experience_of
from tests.layouts import build_actor, config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
LONG = 131_072
PROMPT = 16
VOCABULARY = 2048
# logits of all tokens would take more than everything else together
SIZES = {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": VOCABULARY}
LAYOUTS = {"CP4": P(context=4), "TP2 x CP2": P(tensor=2, sequence=True, context=2)}
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
SCORED = 4 + 4  # bytes of a token's log-prob and entropy


class Measured(NamedTuple):
    """`score`, `step`: the most bytes that tensors made there held at once."""

    logp: torch.Tensor
    score: int
    step: int
    gradient_norm: float


def row_of(length: int) -> Rows:
    tokens = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(3))
    return rows_of([tokens.tolist()], [PROMPT])


def measured_body(
    world: Any, folder: Path, parallel: ParallelConfig, length: int, times: int
) -> Measured:
    actor = build_actor(folder, parallel, OPTIMIZER, token_cap=length)
    rows = row_of(length)
    experience = experience_of(rows)
    found: dict[str, Any] = {}

    def score() -> None:
        found["scored"] = actor.log_probs(rows)

    def step() -> None:
        found["metrics"] = actor.step(experience, policy_loss())

    if parallel.sequence:
        score()  # afterwards Megatron has a buffer for gathered inputs
    scoring = most_bytes(score, without=OF_A_CPU, times=times)
    training = most_bytes(step, without=OF_A_CPU)
    held = get_global_memory_buffer().buffer.values()
    buffers = sum(buffer.nbytes for buffer in held)
    norm = found["metrics"]["grad_norm"]
    return Measured(found["scored"].logp, scoring + buffers, training + buffers, norm)


@torch.no_grad()
def log_probs_of_transformers(folder: Path, length: int) -> torch.Tensor:
    """[length - 1]; with logits of 4096 tokens at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    (tokens,) = row_of(length).tokens
    (hidden,) = model.model(tokens[None]).last_hidden_state
    parts = []
    for first in range(0, length - 1, 4096):
        targets = tokens[first + 1 : first + 4097]
        logits = model.lm_head(hidden[first : first + len(targets)])
        parts.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    return torch.cat(parts)


def assert_within_the_plan(
    folder: Path, parallel: ParallelConfig, length: int, measured: Measured
) -> None:
    config = config_of(folder, parallel, OPTIMIZER, token_cap=length)
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = PROMPT, length - PROMPT
    planned, load = models_of(config)[POLICY], Load(length, 1)
    score = activations.scoring(planned, 0, load, cpu=True) + SCORED * length
    step = activations.training(planned, 0, load, cpu=True) + experience_bytes(config)
    print(length, parallel.context, score / measured.score, step / measured.step)  # for the docs
    assert abs(score - measured.score) <= CLOSE * measured.score, (score, measured.score)
    assert abs(step - measured.step) <= CLOSE * measured.step, (step, measured.step)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_takes_the_memory_of_the_plan_and_has_the_log_probs_of_transformers(
    name: str, tmp_path: Path
) -> None:
    length, parallel = 8192, LAYOUTS[name]
    folder = save_tiny(tmp_path, "qwen3", max_position_embeddings=length, **SIZES)
    wanted = log_probs_of_transformers(folder, length)
    for measured in run_ranks(4, measured_body, folder, parallel, length, 3):
        torch.testing.assert_close(measured.logp[0], wanted, rtol=1e-5, atol=1e-5)
        assert_within_the_plan(folder, parallel, length, measured)


@pytest.mark.ranks
def test_a_row_of_131072_tokens_takes_the_memory_of_the_plan(tmp_path: Path) -> None:
    """In both layouts, whose log-probs and gradients are alike."""
    folder = save_tiny(tmp_path, "qwen3", max_position_embeddings=LONG, **SIZES)
    wanted = log_probs_of_transformers(folder, LONG)
    norms = []
    for parallel in LAYOUTS.values():
        for measured in run_ranks(4, measured_body, folder, parallel, LONG, 1, timeout=3000):
            torch.testing.assert_close(measured.logp[0], wanted, rtol=1e-5, atol=1e-5)
            assert_within_the_plan(folder, parallel, LONG, measured)
            norms.append(measured.gradient_norm)
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
