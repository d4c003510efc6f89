"""Scoring and learning do not depend on how the model and the batch are split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import COUNT, Experience
from rftmega.trainer.optimizer_steps import Schedule, take_steps
from rftmega.weights import Exporter
from tests.layouts import build_actor, rows_of
from tests.plain_loop import trained
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny, transformers_logits

ROWS = [
    [5, 9, 130, 2, 77],
    [3, 0],
    [(37 * i) % 131 for i in range(30)],
    [1, 2, 3, 4, 5, 6],
    [8],
    [7, 7, 7],
    [0, 1, 2, 3],
    [9, 8, 7],
]
PROMPTS = [2, 1, 4, 3, 1, 2, 2, 1]  # row 4 has an empty response
# Adam divides by |g| + epsilon: with the usual 1e-8, an element whose gradient is rounding noise
# moves by a full step in a random direction, whatever the layout. A larger one keeps this a test of
# layouts.
OPTIMIZER = OptimizerConfig(
    epsilon=1e-4,
    learning_rate=1e-2,
    weight_decay=0.1,
    clip_grad=0.5,
    schedule="cosine",
    warmup_steps=2,
)


def experience_of(actor: Any) -> Experience:
    rows = rows_of(ROWS, PROMPTS)
    torch.manual_seed(3)
    stats = actor.log_probs(rows)
    noise = 0.3 * torch.randn(stats.logp.shape)
    return Experience(
        tokens=rows.tokens, prompt_lengths=rows.prompt_lengths, lengths=rows.lengths, mask=rows.mask, behaviour_logp=stats.logp,
        old_logp=stats.logp + noise, reference_logp=actor.reference_log_probs(rows).logp,
        advantage=torch.randn(len(rows), 1) * rows.mask,
    )  # fmt: skip


def score_body(
    world: Any,
    folder: Path,
    parallel: ParallelConfig,
    temperature: float,
    *given: list[list[int]],
) -> Any:
    actor = build_actor(folder, parallel, temperature=temperature)
    return [actor.log_probs(rows_of(rows)) for rows in given]


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.ranks), 0.7])
def test_packed_log_probs_and_entropy_are_those_of_unpacked_rows_in_transformers(
    temperature: float, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "llama")
    (stats,) = run_ranks(2, score_body, folder, ParallelConfig(tensor=2), temperature, ROWS)[1]
    for b, (row, logits) in enumerate(zip(ROWS, transformers_logits(folder, ROWS), strict=True)):
        logp = (logits / temperature).log_softmax(-1)[:-1]
        entropy = -(logp.exp() * logp).sum(-1)
        picked = logp.gather(-1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0]
        torch.testing.assert_close(stats.logp[b, : len(row) - 1], picked, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stats.entropy[b, : len(row) - 1], entropy, atol=1e-5, rtol=1e-5)
        assert stats.logp[b, len(row) - 1 :].abs().sum() == 0


def test_no_token_sees_another_row(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen2")
    changed = [*ROWS]
    changed[2] = [(x + 1) % 131 for x in ROWS[2]]
    found = run_ranks(2, score_body, folder, ParallelConfig(pipeline=2), 1.0, ROWS, changed)[0]
    one, two = (stats.logp for stats in found)
    others = [0, 1, 3, 4, 5, 6, 7]
    torch.testing.assert_close(one[others], two[others], atol=1e-6, rtol=0)
    assert (one[2] - two[2]).abs().max() > 0.1


def poisoned_body(
    world: Any, folder: Path, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> Any:
    actor = build_actor(folder, parallel, optimizer)
    rows = rows_of(ROWS, PROMPTS)
    experience = replace(
        experience_of_plain(actor, rows),
        advantage=torch.full_like(rows.mask, torch.inf, dtype=torch.float32),
    )
    before = {
        name: tensor.clone()
        for name, tensor in Exporter(
            actor.manager.shards(), actor.topology.replica_group, bucket_bytes=2**20
        )
    }
    metrics = actor.step(experience, policy_loss())
    after = dict(Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=2**20))
    return (
        metrics["skipped_steps"],
        actor.manager.learning_rate,
        all(torch.equal(before[n], after[n]) for n in before),
    )


def experience_of_plain(actor: Any, rows: Any) -> Experience:
    logp = actor.log_probs(rows).logp
    return Experience(
        rows.tokens,
        rows.prompt_lengths,
        rows.lengths,
        rows.mask,
        logp,
        logp,
        None,
        torch.ones_like(logp),
    )


@pytest.mark.parametrize(
    ("world", "distributed"),
    [pytest.param(1, False, marks=pytest.mark.ranks), (2, False), (2, True)],
)
def test_a_step_with_gradients_that_are_not_finite_changes_nothing(
    world: int, distributed: bool, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    optimizer = replace(OPTIMIZER, distributed=distributed)
    for skipped, learning_rate, unchanged in run_ranks(
        world, poisoned_body, folder, ParallelConfig(), optimizer
    ):
        assert skipped == 1
        # still the first step's
        assert learning_rate == pytest.approx(OPTIMIZER.learning_rate / OPTIMIZER.warmup_steps)
        assert unchanged


def adam_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    actor = build_actor(
        folder, parallel, replace(OPTIMIZER, clip_grad=0.0, warmup_steps=0, schedule="constant")
    )
    experience = experience_of_plain(actor, rows_of(ROWS, PROMPTS))
    for _ in range(3):
        actor.step(experience, policy_loss())
    return dict(Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=2**20))


def test_three_updates_equal_a_plain_loop_of_transformers_and_torch(tmp_path: Path) -> None:
    """Policy gradient with ratio 1, AdamW without decay on norms: written again, without anything
    of ours.
    """
    folder = save_tiny(tmp_path, "qwen3")
    found = run_ranks(2, adam_body, folder, ParallelConfig(tensor=2))[0]
    model = trained(folder, ROWS, PROMPTS, updates=3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.detach(), atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


PADDING = 7  # sampled in ROWS, and in a prompt


@pytest.mark.parametrize(
    ("variant", "parallel"),
    [
        pytest.param("qwen3", ParallelConfig(tensor=2), marks=pytest.mark.ranks),
        ("qwen2-tied", ParallelConfig(tensor=2, sequence=True)),
        pytest.param("qwen2-tied", ParallelConfig(pipeline=2), marks=pytest.mark.ranks),
    ],
)
def test_the_embedding_of_the_padding_token_learns_nothing_as_in_transformers(
    variant: str, parallel: ParallelConfig, tmp_path: Path
) -> None:
    """A policy can sample the token. Tied, its row still learns as the output head's."""
    folder = save_tiny(tmp_path, variant, pad_token_id=PADDING)
    model = trained(folder, ROWS, PROMPTS, updates=3)
    assert model.get_input_embeddings().padding_idx == PADDING
    rows = run_ranks(2, adam_body, folder, parallel)[0]["model.embed_tokens.weight"]
    wanted = model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(rows, wanted, atol=2e-5, rtol=1e-4)


def mini_batch_body(world: Any, folder: Path) -> Any:
    actor = build_actor(folder, ParallelConfig(), OPTIMIZER, updates_per_epoch=3)
    mini_batches = Schedule(3).mini_batches(torch.ones(len(ROWS), dtype=torch.int64), 0)
    metrics = take_steps(
        actor, experience_of_plain(actor, rows_of(ROWS, PROMPTS)), policy_loss(), mini_batches
    )
    steps = actor.manager.lr_scheduler.num_steps - 1
    broken = experience_of_plain(actor, rows_of(ROWS, PROMPTS))
    advantage = broken.advantage.clone()
    advantage[0] = torch.inf  # in the first mini-batch only
    each: list[dict[str, float]] = []

    class Noted:
        def step(self, *given: Any) -> dict[str, float]:
            each.append(actor.step(*given))
            return each[-1]

    mean = take_steps(Noted(), replace(broken, advantage=advantage), policy_loss(), mini_batches)
    return metrics, steps, mean, each, actor.manager.lr_scheduler.num_steps - 1


def test_as_many_steps_as_asked_for_and_a_skipped_one_leaves_the_others_metrics(
    tmp_path: Path,
) -> None:
    """8 rows in 3 mini-batches."""
    metrics, steps, broken, each, steps_after = run_ranks(
        1, mini_batch_body, save_tiny(tmp_path, "qwen3")
    )[0]
    assert (metrics["skipped_steps"], steps) == (0, 3)
    assert (broken["skipped_steps"], steps_after) == (1, 5)
    assert all(torch.tensor(list(broken.values())).isfinite())
    assert [step["skipped_steps"] for step in each] == [1, 0, 0]
    finite = each[0]["count"], each[0]["learning_rate"]  # which the skipped step has as well
    assert finite != (each[1]["count"], each[1]["learning_rate"])
    for name in (
        broken.keys()
        - {"skipped_steps", "optimizer_steps"}
        - {name for name in broken if name.startswith(COUNT)}
    ):
        assert broken[name] == pytest.approx((each[1][name] + each[2][name]) / 2), name


def bf16_body(world: Any, folder: Path, parallel: ParallelConfig, dtype: str) -> Any:
    optimizer = replace(
        OPTIMIZER,
        learning_rate=1e-3,
        distributed=world.size > 1,
        warmup_steps=0,
        schedule="constant",
    )
    actor = build_actor(folder, parallel, optimizer, dtype=dtype, keep_reference=True)

    def weights() -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in Exporter(
                actor.manager.shards(), actor.topology.replica_group, bucket_bytes=30_000
            )
        }

    start = weights()
    rows = rows_of(ROWS, PROMPTS)
    before = actor.log_probs(rows).logp
    experience = experience_of_plain(actor, rows)
    metrics = [actor.step(experience, policy_loss()) for _ in range(3)]
    trained = weights()
    reference = actor.reference_log_probs(rows).logp
    after_swap = weights()
    assert all(torch.equal(after_swap[name], trained[name]) for name in trained), (
        "the swap did not bring every bit back"
    )
    assert torch.equal(reference, before), "the reference is not the policy of the start"
    return start, metrics, trained


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, ParallelConfig()),
        pytest.param(4, ParallelConfig(tensor=2, pipeline=2), marks=pytest.mark.ranks),
    ],
)
def test_bf16_with_fp32_main_parameters_follows_fp32_within_its_noise(
    world: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3-tied")
    disk = load_file(folder / "model.safetensors")
    exact = run_ranks(1, bf16_body, folder, ParallelConfig(), "float32")[0]
    start, metrics, trained = run_ranks(world, bf16_body, folder, parallel, "bfloat16")[0]
    assert all(torch.equal(start[name], disk[name].bfloat16()) for name in disk)
    for rough, fine in zip(metrics, exact[1], strict=True):
        assert rough["loss"] == pytest.approx(fine["loss"], abs=0.02)
        assert rough["grad_norm"] == pytest.approx(fine["grad_norm"], rel=0.1)
    for name, tensor in trained.items():
        # bf16 keeps 8 bits; Adam moves an element by at most 3 steps of the learning rate
        torch.testing.assert_close(tensor.float(), exact[2][name], atol=6.5e-3, rtol=8e-3)
