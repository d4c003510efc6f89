"""Options of teachers that contradict each other or that nothing would read are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import ParallelConfig, RunConfig
from rftmega.config.options.algorithms import NoPolicyLoss
from rftmega.config.options.environments import Tools
from rftmega.config.options.teachers import Teacher, names_of
from rftmega.config.validation.data import _beside_rewards
from rftmega.config.validation.teachers import teachers


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def problems(*given: Teacher, **changed: Any) -> str:
    config = RunConfig(**changed)
    config.algorithm.teachers = list(given)
    return "\n".join(teachers(config, 2))


SERVED = Teacher(addresses=["http://h:1"], vocabulary="sampled")
REFUSED = [
    (Teacher(), "give it a path"),
    (Teacher(path="X", addresses=["http://h:1"]), "give it a path"),
    (
        Teacher(addresses=["node7"], vocabulary="sampled"),
        "addresses: node7 is no address of a server",
    ),
    (Teacher(path="self", vocabulary="sampled"), "path=self needs prompt"),
    (Teacher(path="self", prompt="p"), "vocabulary=full needs a folder"),
    (Teacher(addresses=["http://h:1"]), "vocabulary=full needs a folder"),
    (Teacher(path="X", key_env="K"), "key_env=K needs addresses"),
    (Teacher(path="X", signal="advantage"), "signal=advantage needs vocabulary=sampled"),
    (
        Teacher(path="X", signal="advantage", vocabulary="sampled", divergence="forward_kl"),
        "signal=advantage needs divergence=reverse_kl",
    ),
    (Teacher(path="X", divergence="jsd", vocabulary="sampled"), "divergence=jsd needs vocabulary"),
    (Teacher(path="X", beta=0.25), "beta=0.25 needs divergence=jsd"),
    (Teacher(path="X", top_k=9), "top_k=9 needs vocabulary=top_k"),
    (Teacher(path="X", discount=0.5), "discount=0.5 needs signal=advantage"),
    (Teacher(path="X", parallel=ParallelConfig(tensor=3)), "parallel.tensor = 3 does not"),
    (replace(SERVED, parallel=ParallelConfig(tensor=2)), "parallel is for a teacher with a folder"),
    (replace(SERVED, backend="fsdp"), "backend is for a teacher with a folder"),
    (
        Teacher(path="X", backend="fsdp", parallel=ParallelConfig(context=2)),
        "parallel.context=2 needs backend=megatron",
    ),
    (
        Teacher(path="X", parallel=ParallelConfig(replicas=2)),
        "parallel.replicas=2 needs backend=fsdp",
    ),
]


@pytest.mark.parametrize(("teacher", "reason"), REFUSED)
def test_a_teacher_with_options_that_nothing_reads_is_refused(
    teacher: Teacher, reason: str, folder: str
) -> None:
    given = replace(teacher, path=folder) if teacher.path == "X" else teacher
    assert f"algorithm.teachers: teacher: {reason}" in problems(given)


def test_sound_teachers_are_accepted_together(folder: str) -> None:
    given = [
        Teacher(path=folder, divergence="jsd", beta=0.2, parallel=ParallelConfig(tensor=2)),
        Teacher(path="self", prompt="hint", vocabulary="top_k", top_k=9),
        replace(SERVED, key_env="K", signal="advantage", discount=0.5),
    ]
    assert problems(*given) == ""
    assert names_of(given) == ["teacher", "teacher_2", "teacher_3"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert f"path={tmp_path} holds no config.json" in problems(Teacher(path=str(tmp_path)))


def test_two_teachers_of_one_name_are_refused(folder: str) -> None:
    given = [Teacher(path=folder, name="expert")] * 2
    assert "two teachers are named expert" in problems(*given)


def test_servers_compute_at_temperature_one() -> None:
    config = RunConfig().rollout
    assert "log-probs at temperature 1" in problems(
        SERVED, rollout=replace(config, temperature=0.7)
    )


def test_a_prompt_of_the_teacher_needs_a_prompt_of_the_data(folder: str) -> None:
    given = Teacher(path=folder, prompt="hint")
    assert "makes prompts of its own" in problems(given, environment=Tools())


def test_a_layout_of_megatron_is_refused_for_another_backend(folder: str) -> None:
    given = Teacher(path=folder, parallel=ParallelConfig(pipeline=2))
    assert "parallel.pipeline=2 needs backend=megatron" in problems(given, backend="fsdp")


def test_a_layout_is_checked_for_the_backend_of_the_teacher(folder: str) -> None:
    pipeline = Teacher(path=folder, backend="megatron", parallel=ParallelConfig(pipeline=2))
    replicas = Teacher(path=folder, backend="fsdp", parallel=ParallelConfig(replicas=2))
    assert problems(pipeline, backend="fsdp") == ""
    assert problems(replicas, backend="megatron") == ""


@pytest.mark.parametrize("signal", ["loss", "advantage"])
def test_no_policy_loss_needs_a_teacher_in_the_loss(signal: Any, folder: str) -> None:
    config = RunConfig()
    config.algorithm.policy_loss = NoPolicyLoss()
    config.algorithm.teachers = [Teacher(path=folder, vocabulary="sampled", signal=signal)]
    refused = "policy_loss.type=none needs a teacher" in "\n".join(teachers(config, 2))
    assert refused == (signal == "advantage")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((), "needs a teacher with signal=loss"),
        ((Teacher(path="X", signal="advantage", vocabulary="sampled"),), "needs a teacher with"),
        ((Teacher(path="X", when={"domain": "a"}),), "teachers[].when, prompt or gate"),
        ((Teacher(path="X", gate="score"),), "teachers[].when, prompt or gate"),
        ((Teacher(path="X", vocabulary="sampled"),), "with vocabulary=sampled"),
        ((Teacher(path="X"),), ""),
        # it does not teach them
        ((Teacher(path="X"), Teacher(path="X", signal="advantage", vocabulary="sampled")), ""),
    ],
)
def test_completions_of_a_data_set_need_a_teacher_that_can_teach_them(
    given: tuple[Teacher, ...], reason: str
) -> None:
    config = RunConfig()
    config.algorithm.teachers = list(given)
    config.algorithm.on_policy_share = 0.5
    config.data.ptx = "x.jsonl"
    said = "\n".join(_beside_rewards(config))
    assert reason in said
    assert bool(reason) == bool(said)
    assert "and data.ptx='' need each other" not in said
    config.data.ptx, config.algorithm.ptx_coef = "", 0.5
    said = "\n".join(_beside_rewards(config))
    assert "needs data.ptx" in said
    assert "with algorithm.ptx_coef=0.5" in said
