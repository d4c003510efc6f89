"""Rewarded and given answers in the same optimizer steps, under two layouts and in a plain loop of
transformers and torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Auxiliary, Experience
from rftmega.trainer.experience import given
from rftmega.trainer.optimizer_steps import Schedule, take_steps
from rftmega.weights import Exporter
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

ROWS, PROMPTS = (
    [[5, 9, 130, 2, 77], [3, 0], [(37 * i) % 131 for i in range(30)], [8], [1, 2, 3, 4, 5, 6]],
    [2, 1, 4, 1, 3],
)
# of the third row, positions whose tokens a tool said: no part of any loss
TOOL = slice(10, 17)
GIVEN, GIVEN_PROMPTS = [[7, 7, 7], [0, 1, 2, 3], [(11 * i) % 131 for i in range(40)]], [1, 3, 20]
TEMPERATURE, COEF = 0.7, 0.4
OPTIMIZER = OptimizerConfig(epsilon=1e-4, learning_rate=1e-2, weight_decay=0.0, clip_grad=0.0)


def body(world: Any, folder: Path, parallel: ParallelConfig, updates_per_epoch: int) -> Any:
    actor = build_actor(
        folder, parallel, replace(OPTIMIZER, distributed=world.size > 2), temperature=TEMPERATURE,
        updates_per_epoch=updates_per_epoch, token_cap=40,
    )  # fmt: skip
    rows = rows_of(ROWS, PROMPTS)
    rows.mask[2, TOOL.start - 1 : TOOL.stop - 1] = False
    logp = actor.log_probs(rows).logp
    experience = Experience(
        rows.tokens,
        rows.prompt_lengths,
        rows.lengths,
        rows.mask,
        logp,
        logp,
        None,
        torch.ones_like(logp),
    )
    auxiliary = Auxiliary("ptx", given(rows_of(GIVEN, GIVEN_PROMPTS)), cross_entropy_loss(), COEF)
    cut = Schedule(updates_per_epoch).mini_batches(torch.ones(len(rows), dtype=torch.int64), 0)
    metrics = [
        take_steps(actor, experience, policy_loss(), cut, auxiliary=auxiliary) for _ in range(2)
    ]
    steps = actor.manager.lr_scheduler.num_steps - 1
    return (
        metrics,
        steps,
        dict(Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=2**20)),
    )


def picked(
    model: Any, rows: list[list[int]], prompts: list[int], temperature: float
) -> torch.Tensor:
    found = []
    for row, prompt in zip(rows, prompts, strict=True):
        logp = (model(torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
        said = range(*TOOL.indices(len(row))) if row == ROWS[2] else range(0)
        chosen = [place for place in range(prompt, len(row)) if place not in said]
        found += [logp[place - 1, row[place]] for place in chosen]
    return torch.stack(found)


@pytest.mark.parametrize("updates_per_epoch", [pytest.param(1, marks=pytest.mark.ranks), 2])
def test_updates_equal_a_plain_loop_in_one_process_and_in_four(
    updates_per_epoch: int, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    adam = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0
    )
    parts = {
        1: [(slice(0, 5), slice(0, 3))],
        2: [(slice(0, 3), slice(0, 2)), (slice(3, 5), slice(2, 3))],
    }[updates_per_epoch]
    olds = [picked(model, ROWS[mine], PROMPTS[mine], TEMPERATURE).detach() for mine, _ in parts]
    shown = []
    for _ in range(2):
        for (mine, others), old in zip(parts, olds, strict=True):
            ratio = (picked(model, ROWS[mine], PROMPTS[mine], TEMPERATURE) - old).exp()
            cross_entropy = -picked(model, GIVEN[others], GIVEN_PROMPTS[others], 1.0).mean()
            loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean() + COEF * cross_entropy
            adam.zero_grad()
            loss.backward()
            adam.step()
            shown.append((loss.item(), cross_entropy.item()))
    for world, parallel in ((1, ParallelConfig()), (4, ParallelConfig(tensor=2, pipeline=2))):
        metrics, steps, weights = run_ranks(world, body, folder, parallel, updates_per_epoch)[0]
        assert steps == 2 * updates_per_epoch, "both losses share an optimizer step"
        for i, found in enumerate(metrics):
            mean = (
                torch.tensor(shown[i * updates_per_epoch : (i + 1) * updates_per_epoch])
                .mean(0)
                .tolist()
            )
            assert [found["loss"], found["ptx_cross_entropy"]] == pytest.approx(mean, rel=1e-4)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                weights[name],
                parameter.detach(),
                atol=2e-5,
                rtol=1e-4,
                msg=f"{world} processes, {name}",
            )
