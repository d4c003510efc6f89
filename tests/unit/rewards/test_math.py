import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rftmega.config import RewardConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.rewards import check_prompts
from rftmega.rewards.create import create
from rftmega.rewards.math import MathPart, MathWorker
from rftmega.rewards.part import Answer, Undecided
from rftmega.rewards.scorer_process import STARTING
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


LABELS = r"""
\$5
\$18.90
\$32,\!348
\$ 12
15\$
$18.90
5\%
0.1\overline{6}
50\text{ cents}
3 \text{ feet}
90^\circ
12\,\text{m}
1,\!045,\!000
6.02 \times 10^{23}
1.6e-19
9.1e-31
-3
.5
3\frac{1}{2}
\frac34
\dfrac{9}{7}
1/2
11\sqrt2
\frac{1 + \sqrt{5}}{2}
1 \pm \sqrt{2}
2\pi i
6 - 5i
e
E
2e
e^{i\pi/3}
\log_2 3
\binom{5}{2}
a_1
4210_5
52_{8}
1011_2
(1011)_2
1011_{\text{two}}
2k+2
3R^2
(x-2)(x-3)
y=2x+3
n=2
1 \le x \le 3
x \in [-2,7]
(-\infty, 3]\cup[5,\infty)
\left[ -\frac{1}{2}, 3 \right)
(1,2)
(6,31,-1)
\left(\frac{3}{2}, -13\right)
\{1, 2, 3\}
1,-2
\emptyset
1 mod 4
1 \pmod 4
n \equiv 1 \pmod{4}
10:30
3\!:\!4
\text{6:00 p.m.}
\text{(A)}
\textbf{(B)}
(C)
A
B,C
\text{Evelyn}
\text{June 20}
\text{even}
yes
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{bmatrix} 1 \\ 0 \end{bmatrix}
\overrightarrow{AB}
\lfloor 3.7 \rfloor
\left| x \right|
\infty
4 \text{ or } 5
""".strip().splitlines()


@pytest.mark.parametrize("label", LABELS)
def test_a_label_matches_itself_in_a_box_in_a_formula_and_alone(part: MathPart, label: str) -> None:
    assert score(part, f"So it is \\boxed{{{label}}}.", label) == 1.0
    assert score(part, label, label) == 1.0
    if not label.startswith("$"):
        assert score(part, f"So it is ${label}$.", label) == 1.0
    assert score(part, r"So it is \boxed{123457}.", label) == 0.0
    assert part.read([label]) == [1.0]


@pytest.mark.parametrize(
    ("response", "label", "equal"),
    [
        (r"\boxed{5}", r"\$5", 1.0),
        (r"\boxed{\$6}", r"\$5", 0.0),
        (r"It costs \$18.90", r"\$18.90", 1.0),
        ("$52_9$", "52_8", 0.0),
        ("$52_{8}$", "52_8", 1.0),
        ("The answer is 52_8", "52_8", 1.0),
        (r"\boxed{52}", "52_8", 0.0),
        (r"\boxed{1011}", "1011_2", 0.0),
        (r"\boxed{1011_2}", "1011", 0.0),
        ("The answer is 1011_2", "1011", 0.0),
        (r"\boxed{1011_2}", "1011_3", 0.0),
        (r"\boxed{1011}", "1011_{10}", 1.0),
        (r"\boxed{1.6e-19}", "9.1e-31", 0.0),
        ("$1.6 \\times 10^{-19}$", r"9.1 \times 10^{-31}", 0.0),
        (r"\boxed{1.6 \times 10^{-19}}", "1.6e-19", 1.0),
        (r"\boxed{2 \cdot 10^{-20}}", "10^{-20}", 0.0),
        (r"\boxed{x = 1.6 \times 10^{-19}}", r"9.1 \times 10^{-31}", 0.0),
        (r"\boxed{0.012346}", r"\frac{1}{81}", 1.0),
        (r"\boxed{\sin(\pi)}", "0", 1.0),
        (r"\boxed{9}", r"9\%", 1.0),
        (r"\boxed{n = 2}", r"1 \pmod 4", 0.0),
        (r"\boxed{n = 2}", r"n \equiv 1 \pmod{4}", 0.0),
        ("4", r"$n \equiv 1 \pmod 4$", 0.0),
        (r"\boxed{n \equiv 5 \pmod{4}}", r"1 \pmod 4", 1.0),
        (r"\boxed{1 \pmod 5}", r"1 \pmod 4", 0.0),
        (r"\boxed{\{1, 2\}}", "(1, 2)", 0.0),
        (r"\boxed{(1, 2)}", r"\{1, 2\}", 0.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{2, 1}", "1, 2", 1.0),
        (r"\boxed{E}", "e", 0.0),
        (r"\boxed{e}", "E", 0.0),
        (r"\boxed{5} or \boxed{6}", "6", 0.0),
    ],
)
def test_what_the_grading_library_passes_over_is_looked_at(
    part: MathPart, response: str, label: str, equal: float
) -> None:
    assert score(part, response, label) == equal


# label -> (right answers, wrong answers)
REAL: dict[str, tuple[list[str], list[str]]] = {
    r"10\,080": (
        ["10080", "10,080", r"10\;080", r"10\:080", r"10\!080", "10~080", "10{,}080", "１０，０８０"],
        ["10080.5", "10", "80"],
    ),
    "10,080": ([r"10\,080"], [r"10\,081", r"10,\,80"]),
    "(1000, 2000)": ([r"(1\,000, 2\,000)"], [r"1\,000"]),
    r"a_{1100}": ([], [r"a_1\,100"]),
    r"e^{i\pi/3}": (
        [r"e^{\frac{i\pi}{3}}", r"\mathrm{e}^{\mathrm{i}\pi/3}", r"\frac{1+i\sqrt3}{2}", r"\cos\frac{\pi}{3}+i\sin\frac{\pi}{3}"],
        [r"e^{i\pi/4}", r"e^{-i\pi/3}", r"e^{\pi/3}", r"\frac{1-i\sqrt3}{2}"],
    ),
    "-1": ([r"e^{i\pi}"], [r"-e^{i\pi}"]),
    "no solution": (
        [r"\text{No solution}", r"\text{no real solutions}", r"\emptyset", r"\text{There are no solutions}",
         r"\text{none}", "无解"],
        ["0", "1", r"\text{one solution}", r"\text{no}", r"\text{DNE}", r"\text{infinitely many solutions}"],
    ),
    r"\emptyset": (
        [r"\varnothing", r"\{\}", r"\{ \}", "∅", r"\text{the empty set}", r"x \in \emptyset"],
        ["0", r"\{0\}", r"\{\emptyset\}"],
    ),
    "{}": ([r"\varnothing"], [r"\{1\}"]),
    "DNE": (
        [r"\text{does not exist}", r"\text{The limit does not exist.}", r"\text{undefined}"],
        ["0", r"\infty", "D", r"\text{exists}"],
    ),
    "0": ([], [r"\text{DNE}", r"\text{no solution}", r"\text{none}"]),
    r"(3,\infty)": (
        ["x>3", "3<x", r"x \gt 3", r"y>3", r"\{x \mid x>3\}", r"x\in(3,\infty)", "x＞3"],
        [r"x\ge 3", "x<3", "x>4", "3", "x=3", "x>2y"],
    ),
    "x>3": ([r"(3,\infty)", r"(3,+\infty)", r"x\in(3,∞)"], [r"[3,\infty)", "y>3", "3", "x=3"]),
    r"[3,\infty)": ([r"x\ge 3", r"x\geqslant 3", "x≥3"], ["x>3"]),
    r"(-2,5]": ([r"-2<x\le 5", r"5\ge x>-2"], ["-2<x<5", r"-2\le x<5"]),
    "(3,5)": (["(3,5)"], ["3<x<5", r"x \in \{3,5\}", "[3,5]"]),  # may be a point
    "3<x<5": (["(3,5)", r"x\in(3,5)"], ["[3,5]", r"\{3,5\}", "3<y<5"]),
    r"x\in(3,5)": (["3<x<5"], [r"3\le x<5"]),
    r"(-\infty,-3)\cup(3,\infty)": (
        [r"x<-3 \text{ or } x>3", r"\mathbb{R}\setminus[-3,3]"],
        ["x^2>9", r"x<-3 \text{ and } x>3", "x<-3, x>3", r"x<-3 \text{ or } y>3", "x<-3"],
    ),
    r"x<1 \text{ or } x>3": ([r"(-\infty,1)\cup(3,\infty)", r"3<x \text{ or } x<1"], ["x<1", r"(-\infty,1)"]),
    r"(-\infty,3)\cup(3,\infty)": ([r"x\ne 3", r"\mathbb{R}\setminus\{3\}"], [r"x\ne 4", r"\mathbb{R}"]),
    r"\mathbb{R}": ([r"(-\infty,\infty)", r"x\in\mathbb{R}"], [r"(0,\infty)"]),
    r"2k\pi": (
        [r"2\pi n", r"x=2k\pi", r"2k\pi, k\in\mathbb{Z}", r"2k\pi \text{ where } k \text{ is an integer}",
         r"2k\pi\text{ for all integers }k"],
        [r"k\pi", r"2\pi x", "2k", r"k\in\mathbb{Z}", r"2\pi nk"],
    ),
    r"k\pi r": ([], [r"n\pi r"]),
    "11{:}30": (["11:30", "11：30", r"11\!:\!30", r"\text{11:30 a.m.}"], ["11:31", "11", "30", r"\frac{30}{11}"]),
    r"\text{6:00 p.m.}": (["6:00 PM"], ["6:00 a.m.", "7:00 p.m."]),
    "3:04": (["3:04"], ["3:4"]),
    "3:4": (["6:8"], ["4:3"]),
    "答案：5": (["5", "５"], ["6"]),
    r"\fbox{5}": (["5"], ["6"]),
}  # fmt: skip


@pytest.mark.parametrize("label", REAL)
def test_answers_as_people_and_models_write_them(part: MathPart, label: str) -> None:
    right, wrong = REAL[label]
    found = part([Answer(f"So \\boxed{{{said}}}.", label) for said in [*right, *wrong]])
    expected = [1.0] * len(right) + [0.0] * len(wrong)
    assert dict(zip([*right, *wrong], found, strict=True)) == dict(
        zip([*right, *wrong], expected, strict=True)
    )
    assert part.read([label]) == [1.0]


STATED = [
    ("答案：5", "5", 1.0),
    ("所以答案是$\\frac12$。", "1/2", 1.0),
    ("答案为６", "5", 0.0),
    ("The answer is x>3", r"(3,\infty)", 1.0),
    ("The limit does not exist.", "DNE", 1.0),
    ("It is not true that the limit does not exist.", "DNE", 0.0),
    ("There is no solution smaller than 5, so 6", "no solution", 0.0),
    (r"$\fbox{5}$", "5", 1.0),
    (r"3, no: \fbox{\frac{\sqrt{3}}{2}}", r"\sqrt{3}/2", 1.0),
    (r"So $2k\pi$, where $k \in \mathbb{Z}$.", r"2k\pi", 1.0),
]


def test_answers_outside_of_a_box(part: MathPart) -> None:
    found = part([Answer(response, label) for response, label, _ in STATED])
    assert [(*case[:2], score) for case, score in zip(STATED, found, strict=True)] == STATED


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{10\,080} it is, not 5.", "10080"),
        ("3 + 4 is 7.", "7"),
        ("Answer: x>3", "x>3"),
        ("No idea.", None),
        ("", None),
    ],
)
def test_the_answer_that_is_compared_can_be_asked_for(
    part: MathPart, response: str, answer: str | None
) -> None:
    assert part.answer_in(response) == answer


def test_a_label_of_which_nothing_can_be_read_is_found_before_training() -> None:
    config = RewardConfig(math=1.0, workers=1)
    good = [Prompt((1,), "7"), Prompt((1,), r"\$5", 1)]
    check_prompts(config, good)
    check_prompts(RewardConfig(), [Prompt((1,), "")])
    with pytest.raises(
        DataError, match=r"reward\.math: the label '' holds no expression.*prompt 7"
    ):
        check_prompts(config, [*good, Prompt((1,), "", 7)])


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
