"""An update with teachers against transformers models and dense autograd in float64: the loss, its
gradient's norm, and each teacher's divergence, in layouts that differ between student and teachers.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftmega.config import ParallelConfig
from rftmega.config.options.algorithms import NoPolicyLoss
from rftmega.config.options.teachers import Teacher
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Samples, Taught
from rftmega.models.kernels.linear_divergence import DivergenceKind
from rftmega.run.placement import teachers as placed
from rftmega.run.placement.phases import DevicePhases
from rftmega.run.train import built_backend
from rftmega.trainer.algorithm import Algorithm
from rftmega.trainer.experience import ExperienceMaker
from tests.distributed.test_divergences import dense_buckets, dense_divergence
from tests.layouts import config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
LENGTHS, PROMPTS = (30, 29, 12, 9, 16, 7), (24, 28, 3, 5, 11, 2)
ROWS = [[(37 * i + 11 * b) % 131 for i in range(length)] for b, length in enumerate(LENGTHS)]
DOMAINS = ["math", "code", "math", "code", "math", "math"]
OWN_PROMPTS = [[(17 * i + 5 * b) % 131 for i in range(4 + b)] for b in range(len(ROWS))]
TEMPERATURE = 0.8


def teachers_of(folder: Path, own: P) -> dict[str, list[Teacher]]:
    """Lists of teachers that a run has at the same time."""
    plain = Teacher(path=str(folder), parallel=own)
    return {
        "full": [
            replace(plain, divergence="reverse_kl", weight=0.5, when={"domain": "math"}),
            replace(plain, divergence="jsd", beta=0.3, weight=2.0),
        ],
        "some": [
            replace(plain, vocabulary="top_k", top_k=5, divergence="forward_kl", prompt="hint"),
            replace(plain, vocabulary="top_k", top_k=3, divergence="jsd", beta=0.4),
            replace(plain, vocabulary="sampled", weight=0.7, when={"domain": "code"}),
        ],
        "self": [
            Teacher(path="self", vocabulary="top_k", top_k=7, prompt="hint"),
            Teacher(path="self", vocabulary="sampled", divergence="forward_kl", prompt="hint"),
        ],
    }


def taught(teacher: Teacher, row: int) -> Taught | None:
    if teacher.when and teacher.when["domain"] != DOMAINS[row]:
        return None
    return Taught(tuple(OWN_PROMPTS[row]) if teacher.prompt else ())


def samples_of(chosen: Sequence[Teacher]) -> Samples[Ragged]:
    rows = rows_of(ROWS, list(PROMPTS)).ragged()
    prompts = [
        Prompt(
            tuple(ROWS[row][: PROMPTS[row]]),
            teachers=tuple(taught(each, row) for each in chosen),
        )
        for row in range(len(ROWS))
    ]
    zeros = torch.zeros(len(ROWS))
    group = torch.arange(len(ROWS)) // 2
    behaviour = rows.mask.with_values(-torch.rand(len(rows.mask.flat)))
    return Samples(prompts, rows, behaviour, zeros, group, zeros.bool(), {})


def body(
    world: Any, folder: Path, teacher: Path, parallel: P, own: P, backend: str, kind: str
) -> Any:
    config = config_of(folder, parallel, backend=backend, token_cap=31, temperature=TEMPERATURE)
    config.algorithm.policy_loss = NoPolicyLoss()
    config.algorithm.teachers = teachers_of(teacher, own)[kind]
    made = built_backend(config)
    policy = made.policy(config)
    built = placed.build(config, made, is_main=False)
    policy.learn_from(placed.terms_of(config, policy, built))
    residencies = {"policy": policy.residency} | {n: m.residency for n, m in built.items()}
    phases = DevicePhases(residencies, offload=True)
    algorithm = Algorithm(config)
    asked = algorithm.asked(
        SimpleNamespace(teachers=placed.scorers(config, policy, built, phases, world))
    )
    maker = ExperienceMaker(policy, config.algorithm, host=OneProcess())
    maker.teachers = asked
    phases.score()
    experience = maker.make(samples_of(config.algorithm.teachers))
    phases.update()
    return policy.step(experience, algorithm.policy_loss())


def dense(
    folder: Path, teacher: Path, chosen: Sequence[Teacher]
) -> tuple[float, float, list[float]]:
    """The loss, the norm of its gradient, and each teacher's mean divergence over trained tokens."""
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    loss, sums, count = torch.zeros((), dtype=torch.float64), [0.0] * len(chosen), 0
    for row, tokens in enumerate(ROWS):
        answer = torch.tensor(tokens[PROMPTS[row] :])
        log_p = log_probs(student, tokens, len(answer))
        count += len(answer)
        for number, each in enumerate(chosen):
            if each.when and each.when["domain"] != DOMAINS[row]:
                continue
            given = tokens
            if each.prompt:
                given = OWN_PROMPTS[row] + tokens[PROMPTS[row] :]
            model = student if each.path == "self" else other
            log_q = log_probs(model, given, len(answer)).detach()
            value = compared(each, log_p, log_q, answer).sum()
            sums[number] += value.item()
            loss = loss + each.weight * value
    (loss / count).backward()
    grads = [p.grad for p in student.parameters() if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
    return loss.item() / count, norm, [value / count for value in sums]


def log_probs(model: Any, tokens: list[int], answers: int) -> Tensor:
    logits = model(torch.tensor([tokens])).logits[0] / TEMPERATURE
    return logits.log_softmax(-1)[-answers - 1 : -1]


def compared(each: Teacher, log_p: Tensor, log_q: Tensor, answer: Tensor) -> Tensor:
    chosen = DivergenceKind(each.divergence, each.beta)
    if each.vocabulary == "full":
        return dense_divergence(log_p, log_q, chosen)
    if each.vocabulary == "top_k":
        ids = log_q.topk(each.top_k, dim=-1).indices
        return dense_divergence(dense_buckets(log_p, ids), dense_buckets(log_q, ids), chosen)
    own, theirs = (x.gather(-1, answer[:, None])[:, 0] for x in (log_p, log_q))
    if each.divergence == "reverse_kl":
        return (own - theirs).square() / 2
    return -(theirs - own).detach().exp() * (own - theirs)


SLOW = pytest.mark.ranks
KINDS = ("full", "some", "self")
LAYOUTS = {
    "one": (1, P(), P(), "megatron"),
    "TP": (2, P(tensor=2, sequence=True), P(), "megatron"),
    "FSDP": (2, P(), P(tensor=2), "fsdp"),
    "CP PP": (4, P(context=2, pipeline=2), P(tensor=4), "megatron"),
    "TP PP": (4, P(tensor=2, pipeline=2), P(pipeline=2), "megatron"),
    "VPP": (2, P(pipeline=2, virtual_pipeline=2), P(context=2), "megatron"),
    "FSDP TP": (2, P(tensor=2), P(), "fsdp"),
}
QUICK = {("full", "TP"), ("some", "FSDP"), ("self", "one")}  # in `make test`


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else SLOW)
        for kind in KINDS
        for name in LAYOUTS
    ],
)
def test_an_update_with_teachers_equals_dense_autograd(
    kind: str, layout: str, tmp_path: Path
) -> None:
    processes, parallel, own, backend = LAYOUTS[layout]
    folder = save_tiny(tmp_path / "student", "qwen3", num_hidden_layers=4)
    teacher = save_tiny(
        tmp_path / "teacher", "llama", seed=5, hidden_size=96, tie_word_embeddings=False
    )
    given = (folder, teacher, parallel, own, backend, kind)
    loss, norm, divergences = dense(folder, teacher, teachers_of(teacher, own)[kind])
    for metrics in run_ranks(processes, body, *given):
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        names = ["teacher", "teacher_2", "teacher_3"]
        for name, value in zip(names, divergences, strict=False):
            assert metrics[f"{name}_divergence"] == pytest.approx(value, rel=1e-5)
