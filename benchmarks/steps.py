"""Compares whole training steps: packed with padded, and with plain transformers and torch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import save_model
from benchmarks.timing import Comparison, compare
from rftmega.algorithms.losses import policy_loss
from rftmega.backends.megatron.forward import LogProbs, custom_forward
from rftmega.backends.runner.micro_batches import plan_micro_batches
from rftmega.config import AlgorithmConfig, KLConfig, OptimizerConfig, ParallelConfig
from rftmega.core.shards import Shard
from rftmega.core.types import Completion, Prompt, Rollout, SliceChecksums, Trajectory
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.learner import Learner
from rftmega.trainer.ppo import PPOTrainer, StepParts, StepSampling
from tests.layouts import build_actor
from tests.ranks import run_ranks

LONGEST = 512
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, weight_decay=0.01)


def long_tail(rows: int) -> torch.Tensor:
    """Returns lognormal row lengths: most short, a few of the full length."""
    torch.manual_seed(1)
    return (60 * torch.randn(rows).exp()).long().clamp(8, LONGEST)


def step(
    manager: Any, micro_batches: list[tuple[torch.Tensor, torch.Tensor]], *, packed: bool
) -> None:
    """Takes one optimizer step that raises the log-prob of every token; a micro-batch is (ids [B, S
    + 1], mask [B, S]).
    """
    manager.zero_grad()
    processor = LogProbs(manager.description.vocabulary)
    for ids, mask in micro_batches:
        targets = {"targets": ids[:, 1:]}
        stats = custom_forward(
            manager.model[0], ids[:, :-1], mask, None, False, pack_seqs=packed, logits_processor=processor,
            logits_processor_args=targets, max_batch_seqlen=None,
        )  # fmt: skip
        (-stats["logp"] * mask).sum().backward()
    manager.take_step()


def packed_body(world: Any, folder: Path) -> dict[str, float]:
    manager = build_actor(folder, ParallelConfig(), OPTIMIZER).manager
    lengths = long_tail(48)
    ids = torch.randint(4096, (len(lengths), LONGEST + 1))
    (plan,) = plan_micro_batches(lengths.tolist(), data_parallel=1, token_cap=2048).rows

    def batch(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        longest = int(lengths[rows].max())
        return ids[rows, : longest + 1], torch.arange(longest) < lengths[rows, None]

    packed = [batch(torch.tensor(rows)) for rows in plan]
    # four rows at a time, in order
    padded = [batch(rows) for rows in torch.arange(len(lengths)).split(4)]
    found = compare(
        lambda: step(manager, packed, packed=True),
        lambda: step(manager, padded, packed=False),
        rounds=5,
    )
    valid, total = int(lengths.sum()), sum(mask.numel() for _, mask in padded)
    return {
        "packed_seconds": found.ours,
        "padded_seconds": found.theirs,
        "speedup": found.ratio,
        "padded_over_valid_tokens": total / valid,
        "share_of_ideal": found.ratio / (total / valid),
    }


def against_transformers_body(world: Any, folder: Path) -> dict[str, float]:
    """Compares rows of one length, so that neither side gains from packing.

    Ours computes the entropy as well, theirs does not.
    """
    manager = build_actor(folder, ParallelConfig(), OPTIMIZER).manager
    ids = torch.randint(4096, (8, 257))
    mask = torch.ones(8, 256, dtype=torch.bool)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01)

    def plain_step() -> None:
        adam.zero_grad()
        for part in ids.split(4):
            logits = plain(part[:, :-1], use_cache=False).logits.float()
            logp = logits.log_softmax(-1).gather(-1, part[:, 1:, None])[..., 0]
            (-logp).sum().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()

    ours = [(part, mask[:4]) for part in ids.split(4)]
    found: Comparison = compare(lambda: step(manager, ours, packed=True), plain_step, rounds=7)
    return {
        "ours_seconds": found.ours,
        "transformers_seconds": found.theirs,
        "times_theirs": 1 / found.ratio,
    }


class RandomCompletions:
    """RandomCompletions is an engine that returns random tokens at once, and its weight sync."""

    version = 0

    def push(self, *, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> "RandomCompletions":
        return self

    def checksums(self) -> list[SliceChecksums]:
        return []

    def close(self) -> None: ...

    def answering_with(self, adapter: str) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], **how: Any
    ) -> list[Rollout | None]:
        found: list[Rollout | None] = []
        for prompt, length in zip(prompts, long_tail(len(prompts)).tolist(), strict=True):
            ids = tuple(torch.randint(4096, (length,)).tolist())
            completion = Completion(ids, (-8.0,) * length, "stop", self.version)
            found.append(Rollout((Trajectory.of(prompt.token_ids, completion),)))
        return found


def scoring_body(world: Any, folder: Path) -> dict[str, float]:
    """Measures a whole step of one optimizer step, with the reference in its loss: 32 completions
    of 8 prompts.
    """
    actor, engine = (
        build_actor(folder, ParallelConfig(), OPTIMIZER, token_cap=2048, keep_reference=True),
        RandomCompletions(),
    )

    def trainer(late: bool) -> PPOTrainer:
        return PPOTrainer(
            engine=engine, weights=engine, reward=lambda p, found: [{"reward": float(len(x.response_ids))} for x in found],
            maker=ExperienceMaker(actor, AlgorithmConfig(kl=KLConfig(coef=0.1))),
            learner=Learner(actor, policy_loss(kl_coef=0.1)),
            sampling=StepSampling(4, 1.0, seed=0), parts=StepParts(late_scoring=late),
        )  # fmt: skip

    prompts = [Prompt(tuple(range(1, 9)), index=number) for number in range(8)]

    def step_of(made: PPOTrainer) -> None:
        made.step = engine.version
        torch.manual_seed(0)
        made.train_step(prompts)

    late, early = trainer(True), trainer(False)
    found = compare(lambda: step_of(late), lambda: step_of(early), rounds=3)
    return {
        "late_seconds": found.ours,
        "early_seconds": found.theirs,
        "late_over_early": 1 / found.ratio,
    }


def late_against_early_scoring(folder: Path) -> dict[str, float]:
    return run_ranks(1, scoring_body, save_model(folder, num_hidden_layers=4), timeout=600)[0]


def packed_against_padded(folder: Path) -> dict[str, float]:
    return run_ranks(1, packed_body, save_model(folder), timeout=600)[0]


def against_transformers(folder: Path) -> dict[str, float]:
    return run_ranks(1, against_transformers_body, save_model(folder), timeout=600)[0]
