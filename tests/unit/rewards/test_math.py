import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rftmega.config import RewardConfig
from rftmega.rewards.create import create
from rftmega.rewards.math import STARTING, MathPart, MathWorker
from rftmega.rewards.part import Answer, Undecided
from rftmega.types import Prompt
from tests.rollouts import answered


@pytest.fixture(scope="module")
def part() -> Iterator[MathPart]:
    part = MathPart(workers=1, seconds=60.0)
    yield part
    part.close()


def score(part: MathPart, response: str, label: str) -> float:
    return part([Answer(response, label)])[0]


@pytest.mark.parametrize(
    ("response", "label", "equal"),
    [
        ("The answer is 7", "7", 1.0),
        ("The answer is 7.0", "7", 1.0),
        ("The answer is 8", "7", 0.0),
        (r"so $0.5$", r"\frac{1}{2}", 1.0),
        (r"so \boxed{\frac{2}{4}}", "1/2", 1.0),
        (r"so \boxed{\frac{1}{2}}", r"$\frac{1}{2}$", 1.0),
        (r"$2\sqrt 2$", r"\sqrt{8}", 1.0),
        (r"\boxed{2}", r"\frac{1}{2}", 0.0),  # a digit of the label is not the label
        (r"\boxed{10000}", "10,000", 1.0),
        ("", "7", 0.0),
        ("", "", 0.0),
        ("\\boxed{" * 2000, "7", 0.0),
        ("(" * 20000, "7", 0.0),
        ("\x00\ud800\U0010ffff\n7", "7", 1.0),
        ("7", "}{\\frac", 0.0),
    ],
)
def test_equal_expressions_score_however_they_are_written_and_nothing_raises(
    part: MathPart, response: str, label: str, equal: float
) -> None:
    assert score(part, response, label) == equal


def test_a_monstrous_expression_scores_nothing_and_the_next_one_is_answered() -> None:
    """A power tower is one multiplication to Python, which no handler of a signal interrupts."""
    worker = MathWorker(seconds=60.0)
    assert worker.equal("7", "7") == 1.0
    process, worker.seconds = worker.process, 0.3
    assert worker.equal(r"$9^{9^{9^{9}}}$", "7") == 0.0
    assert process is not None and process.returncode == -signal.SIGALRM, (
        "ended by its own alarm, with nobody watching"
    )
    worker.seconds = 60.0
    assert worker.equal("7", "7") == 1.0
    process = worker.process
    assert process is not None
    assert worker.equal("7", "7") == 1.0 and worker.process is process, (
        "a process serves many answers"
    )
    worker.close()
    assert process.poll() is not None


def test_a_worker_that_died_between_answers_is_replaced(part: MathPart) -> None:
    assert score(part, "7", "7") == 1.0
    worker = part.free.get()
    assert worker.process is not None
    os.kill(worker.process.pid, 9)
    worker.process.wait()
    part.free.put(worker)
    assert score(part, "7", "7") == 1.0


def test_threads_get_their_own_answers(part: MathPart) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda n: part([Answer(f"{n}", "3"), Answer("3", f"{n}.0")]), range(6))
        )
    assert found == [[float(n == 3)] * 2 for n in range(6)]


def test_an_answer_that_took_too_long_or_whose_process_died_is_undecided_and_counted() -> None:
    """In the metrics it is a share of its own: a 0 would say that the answer is wrong."""
    config = RewardConfig(math=1.0, workers=1)
    reward = create(config, lambda ids: "".join(map(chr, ids)))
    texts = ["7", "8"]
    answers = [answered(tuple(map(ord, text)), (0.0,) * len(text), "stop", 0) for text in texts]
    found = reward([Prompt((1,), "7")] * 2, answers)
    assert [score["math"] for score in found] == [1.0, 0.0]
    assert [score["math_undecided"] for score in found] == [0.0, 0.0]
    reward.parts["math"] = lambda answers: [Undecided() for _ in answers]
    (lost,) = reward([Prompt((1,), "7")], answers[:1])
    assert lost == {
        "math": 0.0,
        "math_undecided": 1.0,
        "exact_match": 1.0,
        "reward": lost["reward"],
    }

    class Dead(MathWorker):
        def _line(self, process: object, seconds: float) -> str:  # type: ignore[override]
            return "ready\n" if seconds == STARTING else ""

    worker = Dead(1.0)
    assert isinstance(worker.equal("7", "7"), Undecided)
    worker.close()
