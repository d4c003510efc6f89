"""A server of a teacher that fails for one process ends the run on all of them, at once."""

from typing import Any

from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import EngineError
from rftmega.core.teacher_scores import TeacherRequest
from rftmega.rollout.servers import served_teacher
from rftmega.rollout.servers.served_teacher import ServedTeacher
from tests.ranks import run_ranks
from tests.unit.rollout.servers.test_served_teacher import VOCABULARY, good, rows, served


def body(world: Any, address: str) -> str:
    served_teacher.ATTEMPTS = 2
    nobody = "http://127.0.0.1:9"
    chosen = Teacher(addresses=[nobody if world.rank else address])
    teacher = ServedTeacher(
        chosen, vocabulary=VOCABULARY, rank=world.rank, ranks=world.size, pause=0.0
    )
    try:
        teacher.teach(rows(), TeacherRequest("sampled"))
    except EngineError as error:
        return str(error)
    return ""


def test_a_failure_of_one_process_is_raised_on_all() -> None:
    with served(good) as (address, _):
        first, second = run_ranks(2, body, address, timeout=60)
    assert first == second
    assert "http://127.0.0.1:9" in first
