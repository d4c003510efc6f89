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

from rftmega.config import OptimizerConfig, ParallelConfig, RunConfig
from rftmega.config.options.algorithms import NoPolicyLoss
from rftmega.config.options.teachers import Teacher
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Samples, Taught
from rftmega.models.kernels.linear_divergence import DivergenceKind
from rftmega.run.placement import teachers as placed
from rftmega.run.placement.colocated import ColocatedPolicy
from rftmega.run.placement.phases import DevicePhases
from rftmega.run.train import built_backend
from rftmega.trainer.algorithm import Algorithm
from rftmega.trainer.experience import ExperienceMaker
from rftmega.weights import Exporter
from tests.distributed.test_changed_weights import save_rwkv
from tests.distributed.test_divergences import dense_buckets, dense_divergence
from tests.layouts import config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_decoders import save_decoder
from tests.tiny_models import VOCABULARY, save_tiny

P = ParallelConfig
LENGTHS, PROMPTS = (30, 29, 12, 9, 16, 7), (24, 28, 3, 5, 11, 2)
ROWS = [[(37 * i + 11 * b) % 131 for i in range(length)] for b, length in enumerate(LENGTHS)]
DOMAINS = ["math", "code", "math", "code", "math", "math"]
OWN_PROMPTS = [[(17 * i + 5 * b) % 131 for i in range(4 + b)] for b in range(len(ROWS))]
TEMPERATURE = 0.8


def teachers_of(folder: Path, own: P, backend: Any = "auto") -> dict[str, list[Teacher]]:
    """Lists of teachers that a run has at the same time."""
    plain = Teacher(path=str(folder), parallel=own, backend=backend)
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


def body(world: Any, folder: Path, parallel: P, backend: str, chosen: list[Teacher]) -> Any:
    config = config_of(folder, parallel, backend=backend, token_cap=31, temperature=TEMPERATURE)
    policy, maker, phases = made(config, chosen, world)
    phases.score()
    experience = maker.make(samples_of(chosen))
    phases.update()
    return policy.step(experience, Algorithm(config).policy_loss())


def made(
    config: RunConfig, chosen: list[Teacher], world: Any
) -> tuple[Any, ExperienceMaker, DevicePhases]:
    """A policy that learns from the teachers alone, and who asks them."""
    config.algorithm.policy_loss = NoPolicyLoss()
    config.algorithm.teachers = chosen
    backend = built_backend(config)
    policy = backend.policy(config)
    built = placed.build(config, backend, is_main=False)
    policy.learn_from(placed.terms_of(config, policy, built))
    residencies = {"policy": policy.residency} | {n: m.residency for n, m in built.items()}
    phases = DevicePhases(residencies, offload=True)
    teachers = placed.scorers(config, policy, built, phases, world)
    maker = ExperienceMaker(policy, config.algorithm, host=OneProcess())
    maker.teachers = Algorithm(config).asked(SimpleNamespace(teachers=teachers))
    return policy, maker, phases


def dense(
    folder: Path,
    teacher: Path,
    chosen: Sequence[Teacher],
    weights: dict[str, Tensor] | None = None,
) -> tuple[float, float, list[float]]:
    """The loss, the norm of its gradient, and each teacher's mean divergence over trained tokens;
    of the student in `folder`, or one with other `weights`.
    """
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if weights is not None:
        student.load_state_dict(weights)
    other = AutoModelForCausalLM.from_pretrained(
        teacher,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    other.train()  # RWKV scales its weights otherwise
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
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0] / TEMPERATURE
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
    compare(processes, folder, teacher, parallel, backend, teachers_of(teacher, own)[kind])


def compare(
    processes: int, folder: Path, teacher: Path, parallel: P, backend: str, chosen: list[Teacher]
) -> None:
    loss, norm, divergences = dense(folder, teacher, chosen)
    for metrics in run_ranks(processes, body, folder, parallel, backend, chosen):
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        names = ["teacher", "teacher_2", "teacher_3"]
        for name, value in zip(names, divergences, strict=False):
            assert metrics[f"{name}_divergence"] == pytest.approx(value, rel=1e-5)


# processes, layouts of student and teachers, backends of both, the teachers' family
MIXED = {
    "TP DP, FSDP TP": (4, P(tensor=2, sequence=True), P(tensor=2), "megatron", "fsdp", "gemma3"),
    "CP PP, FSDP": (4, P(context=2, pipeline=2), P(replicas=2), "megatron", "fsdp", "gemma2"),
    "DP, FSDP": (2, P(), P(), "megatron", "fsdp", "rwkv"),
    "FSDP TP, TP DP": (4, P(tensor=2), P(tensor=2, sequence=True), "fsdp", "megatron", "llama"),
    "FSDP, TP PP": (4, P(), P(tensor=2, pipeline=2), "fsdp", "megatron", "llama"),
    "FSDP, EP": (2, P(), P(expert=2), "fsdp", "megatron", "qwen3-moe"),
}
QUICK_MIXED = {("full", "DP, FSDP"), ("some", "FSDP, EP")}


def saved_teacher(folder: Path, family: str) -> Path:
    if family == "rwkv":
        return save_rwkv(folder, VOCABULARY)
    if family == "gemma2":
        return save_decoder(folder, family, final_logit_softcapping=3.0)
    if family == "gemma3":
        return save_decoder(folder, family)
    return save_tiny(folder, family, seed=5, hidden_size=96)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK_MIXED else SLOW)
        for kind in ("full", "some")
        for name in MIXED
    ],
)
def test_an_update_with_teachers_on_the_other_backend_equals_dense_autograd(
    kind: str, layout: str, tmp_path: Path
) -> None:
    processes, parallel, own, backend, of_teacher, family = MIXED[layout]
    folder = save_tiny(tmp_path / "student", "qwen3", num_hidden_layers=4)
    teacher = saved_teacher(tmp_path / "teacher", family)
    chosen = teachers_of(teacher, own, of_teacher)[kind]
    compare(processes, folder, teacher, parallel, backend, chosen)


def replay_body(
    world: Any, folder: Path, parallel: P, backend: str, chosen: list[Teacher]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The metrics of a second update, on completions and their twins of the first one, and the
    weights before it.
    """
    config = config_of(
        folder,
        parallel,
        OptimizerConfig(learning_rate=1e-2),
        backend=backend,
        token_cap=31,
        temperature=TEMPERATURE,
    )
    config.algorithm.replay.max_age = 1
    policy, maker, phases = made(config, chosen, world)
    algorithm, samples = Algorithm(config), samples_of(chosen)
    mixer = algorithm.replay(ColocatedPolicy(policy, phases), None, maker.teachers)
    assert mixer is not None
    for step in range(2):
        phases.score()
        mask = samples.rows.mask
        versions = mask.with_values(torch.where(mask.flat, step, -1))
        experience = maker.make(replace(samples, versions=versions))
        trained, _ = mixer.beside(experience, step)
        phases.update()
        exporter = Exporter(policy.shards(), policy.replica_group, bucket_bytes=20_000)
        weights = {name: tensor.clone() for name, tensor in exporter}
        metrics = policy.step(trained, algorithm.policy_loss())
        mixer.keep(experience, samples.group)
    assert len(trained) == 2 * len(ROWS)
    return metrics, weights


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "megatron") for kind in ("full", "self")),
        *(pytest.param(kind, "fsdp", marks=SLOW) for kind in KINDS),
    ],
)
def test_replayed_rows_are_taught_like_new_ones(kind: str, backend: str, tmp_path: Path) -> None:
    """A mean over completions and their twins is that over the completions, if the present policy
    and its teachers compute both.
    """
    folder = save_tiny(tmp_path / "student", "qwen3", num_hidden_layers=4)
    teacher = saved_teacher(tmp_path / "teacher", "llama")
    chosen = teachers_of(teacher, P())[kind]
    ((metrics, weights),) = run_ranks(1, replay_body, folder, P(), backend, chosen)
    loss, norm, divergences = dense(folder, teacher, chosen, weights)
    assert loss != pytest.approx(dense(folder, teacher, chosen)[0], rel=1e-2), "it has learnt"
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, value in zip(("teacher", "teacher_2", "teacher_3"), divergences, strict=False):
        assert metrics[f"{name}_divergence"] == pytest.approx(value, rel=1e-5)
