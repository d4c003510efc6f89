"""Builds the teachers of a run and the distillation terms of the policy's loss."""

import logging
from collections.abc import Sequence
from typing import Any

from rftmega.config import RunConfig
from rftmega.config.options.teachers import names_of
from rftmega.config.teacher_config import config_of
from rftmega.core.interfaces import TeacherScorer
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import Rows
from rftmega.models.kernels.linear_divergence import DivergenceKind
from rftmega.models.kernels.teacher_terms import TeacherTerm
from rftmega.rollout.servers.served_teacher import ServedTeacher
from rftmega.run.built_backend import built_backend
from rftmega.run.placement.backend import Backend, TrainablePolicy
from rftmega.run.placement.phases import POLICY, DevicePhases
from rftmega.runtime.parallel.process_group import World

log = logging.getLogger(__name__)


def build(config: RunConfig, backend: Backend, *, is_main: bool) -> dict[str, TrainablePolicy]:
    """Builds the teachers that the run itself holds; returns name -> model. `backend`: the run's;
    a teacher may have another one.
    """
    found = {}
    teachers = config.algorithm.teachers
    for name, teacher in zip(names_of(teachers), teachers, strict=True):
        if not teacher.loads:
            continue
        own = config_of(config, teacher)
        builder = backend if own.backend == config.backend else built_backend(own)
        found[name] = builder.teacher(own)
        if is_main:
            log.info(
                "%s: %s, backend %s, %s", name, found[name].path, own.backend, found[name].layout
            )
    return found


def terms_of(
    config: RunConfig, policy: TrainablePolicy, built: dict[str, TrainablePolicy]
) -> list[TeacherTerm]:
    """Returns the distillation term of each teacher with signal=loss, in the order of
    algorithm.teachers.

    The divergence over the full vocabulary needs the teacher's LM head. A process that holds rows
    of the policy's LM head therefore gets the teacher's rows of the same token ids. `built`: see
    `build`.
    """
    found = []
    teachers = config.algorithm.teachers
    for name, teacher in zip(names_of(teachers), teachers, strict=True):
        if teacher.signal != "loss":
            continue
        divergence = DivergenceKind(teacher.divergence, teacher.beta)
        if teacher.vocabulary != "full":
            found.append(TeacherTerm(divergence))
            continue
        held, model = policy.held_rows, built[name]
        common = min(policy.description.vocabulary, model.description.vocabulary)
        head = None
        if held is not None:
            head = model.head_source.rows(held, policy.dtype)
            # the policy's kernel divides by the temperature over the policy's own factor
            head = head._replace(factor=head.factor / policy.logits_factor)
        found.append(TeacherTerm(divergence, head, common))
    return found


class ColocatedTeacher:
    """ColocatedTeacher wraps a teacher that the run holds: before each computation it moves the
    teacher's weights to the device. `name`: the model's name in `phases`.
    """

    def __init__(self, model: TrainablePolicy, phases: DevicePhases, name: str = POLICY):
        self.model, self.phases, self.name = model, phases, name

    def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
        self.phases.score(self.name)
        return self.model.teach(rows, request)


def scorers(
    config: RunConfig,
    policy: TrainablePolicy,
    built: dict[str, TrainablePolicy],
    phases: DevicePhases,
    world: World,
) -> Sequence[TeacherScorer]:
    """Returns the teachers of algorithm.teachers, in their order."""
    found: list[TeacherScorer] = []
    teachers = config.algorithm.teachers
    for name, teacher in zip(names_of(teachers), teachers, strict=True):
        if teacher.is_self:
            found.append(ColocatedTeacher(policy, phases))
        elif teacher.loads:
            found.append(ColocatedTeacher(built[name], phases, name))
        else:
            vocabulary = policy.description.vocabulary
            found.append(
                ServedTeacher(teacher, vocabulary=vocabulary, rank=world.rank, ranks=world.size)
            )
    return found
