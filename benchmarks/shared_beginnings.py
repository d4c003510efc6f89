"""Compares scoring and update of completions that begin alike, with each common beginning computed
once, and with each completion computing its own.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.models import save_model
from benchmarks.timing import compare
from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Rows
from tests.allocations import most_bytes
from tests.distributed.test_plan import OF_A_CPU, experience_of
from tests.layouts import build_policy
from tests.ranks import run_ranks

GROUP, RESPONSE = 8, 128  # completions of a prompt, and tokens of each
LONG, SHORT = 1024, 8  # tokens of a prompt
ROUNDS = 5
OPTIMIZER = OptimizerConfig(learning_rate=1e-5)


def rows_of(prompt: int) -> Rows:
    """Returns the rows of one prompt."""
    torch.manual_seed(prompt)
    tokens = torch.randint(4096, (GROUP, prompt + RESPONSE))
    tokens[:, :prompt] = tokens[0, :prompt]
    lengths = torch.full((GROUP,), prompt + RESPONSE)
    return Rows.of_completions(tokens, torch.full((GROUP,), prompt), lengths)


def measured_body(world: Any, folder: Path, backend: str, prompt: int) -> dict[str, float]:
    rows = rows_of(prompt)
    experience = experience_of(rows)
    cap = rows.tokens.numel()
    policies = [
        build_policy(
            folder,
            ParallelConfig(),
            OPTIMIZER,
            backend=backend,
            token_cap=cap,
            share_prefixes=shared,
        )
        for shared in (True, False)
    ]

    def work(policy: Any) -> None:
        policy.log_probs(rows)
        policy.step(experience, policy_loss())

    ours, theirs = policies
    found = compare(lambda: work(ours), lambda: work(theirs), rounds=ROUNDS)
    least = (prompt + GROUP * RESPONSE) / (GROUP * (prompt + RESPONSE))
    memory = [
        most_bytes(lambda policy=policy: work(policy), without=OF_A_CPU)  # type: ignore[misc]
        for policy in policies
    ]
    return {
        "shared_seconds": found.ours,
        "separate_seconds": found.theirs,
        "times as fast": found.ratio,
        "share of the bound": found.ratio * least,
        "time over": 1 / found.ratio,
        "memory over": memory[0] / memory[1],
        "tokens over": least,
    }


def against_separate(folder: Path) -> dict[str, float]:
    """Measures a long and a short prompt on both backends."""
    save_model(folder)
    found: dict[str, float] = {}
    for backend in ("megatron", "fsdp"):
        for prompt in (LONG, SHORT):
            (measured,) = run_ranks(1, measured_body, folder, backend, prompt, timeout=1800)
            name = f"{backend}, prompt of {prompt}"
            found |= {f"{name}: {figure}": value for figure, value in measured.items()}
    return found
