"""A run that is stopped anywhere within a step goes on there, and is the run that nothing stopped."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.backends.megatron import model_runner
from rftmega.config import RolloutConfig, RunConfig, load
from rftmega.core.errors import CheckpointError, Preempted
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.rollout_arrays import selected
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import (
    Completion,
    Prompt,
    Rollout,
    Rows,
    Sampling,
    TokenStats,
    Trajectory,
    Turn,
)
from rftmega.data.sampler import PromptOrder
from rftmega.monitoring.observers.checkpointing import Checkpointing, restore
from rftmega.monitoring.observers.evaluate import Evaluate
from rftmega.monitoring.observers.metric_writers import JSONLines
from rftmega.monitoring.observers.observer import Observer
from rftmega.trainer import Algorithm
from rftmega.trainer.experience import given
from rftmega.trainer.journal import Journal, JournaledEngine, JournaledPolicy, JournaledTeacher
from rftmega.trainer.optimizer_steps import take_steps
from tests.rollouts import Alone, answered
from tests.tiny_models import save_tiny
from tests.unit.config.observed import STOP, WORDS, Model, bigrams
from tests.unit.monitoring.observers.test_checkpointing import lines, read, written

STEPS = 2
PLAIN = (
    "algorithm.updates_per_epoch=3",
    "algorithm.kl.coef=0.1",
    "algorithm.kl.target=0.01",
    "algorithm.kl.horizon=10",
)
CRITIC = (*PLAIN, "algorithm.advantage=gae", "reward.shaping.normalise=true")
REPLAY = (
    "algorithm.updates_per_epoch=2",
    "algorithm.replay.max_age=2",
    "algorithm.importance_sampling=token",
)
REFILL = ("algorithm.dynamic_sampling.max_rounds=2",)
EARLY = (*REFILL, "algorithm.dynamic_sampling.oversample=2")


class Clock:
    """Ticks for everything that is done; asked to stop from tick `end` on."""

    def __init__(self, end: float):
        self.now, self.end = 0, end

    def tick(self) -> None:
        self.now += 1

    def over(self) -> bool:
        return self.now >= self.end


class Ticking(Model):
    """A tick an optimizer step or scoring pass."""

    def __init__(self, clock: Clock, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.clock = clock
        self.machine.run_schedule = self._ticking(self.machine.run_schedule)
        self.machine.take_step = self.move

    def move(self) -> tuple[bool, float]:
        self.machine.table.data -= self.machine.table.grad
        return True, 1.0

    def _ticking(self, work: Any) -> Any:
        def ticking(*given: Any, **named: Any) -> Any:
            self.clock.tick()
            return work(*given, **named)

        return ticking


class Machinery:
    """Engine, policy, critic: one tick an answer, too."""

    def __init__(self, config: RunConfig, clock: Clock):
        self.clock = clock
        self.host = OneProcess()
        self.policy = Ticking(clock, config, [], 1)
        self.critic = (
            Ticking(clock, config, [], 1, values=True)
            if config.algorithm.advantage.needs_critic
            else None
        )
        self.scoring_models: dict[str, Any] = {}
        self.inner = Alone(config.rollout, vocabulary=WORDS, stop_ids=[STOP])
        self.engine = self.weights = self

    def push(self, *, version: int) -> dict[str, float]:
        self.inner.load_weights([], version=version)
        return {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        reward: Any = None,
        enough: Any = None,
        expected_lengths: Any = None,
    ) -> Any:
        """With `enough` all but the last."""
        assert expected_lengths is None or len(expected_lengths) == len(prompts)
        found: list[Rollout | None] = [None] * len(prompts)
        for place, prompt in enumerate(prompts):
            if self.clock.over():
                raise Preempted(found if enough is None else None)
            self.clock.tick()
            (completion,) = self.inner.generate([prompt], seeds=[seeds[place]], sampling=sampling)
            found[place] = completion
            if reward is not None:
                found[place] = replace(completion, scores=reward([prompt], [completion])[0])
        return found if enough is None else [*found[:-1], None]

    def weight_sync(self, shards: Any, *, bucket_bytes: int) -> Any: ...

    def close(self) -> None: ...

    def tables(self) -> list[torch.Tensor]:
        return [model.machine.table for model in (self.policy, self.critic) if model is not None]


class Kept:
    """Checkpoints in memory: states as text, weights as a copy."""

    def __init__(self, machinery: Machinery):
        self.machinery = machinery
        self.saved: list[tuple[str, list[torch.Tensor]]] = []

    def save(self, state: dict[str, Any], *, step: int) -> None:
        assert state["trainer"]["step"] == step
        self.saved.append(
            (written(state), [table.detach().clone() for table in self.machinery.tables()])
        )

    def wait(self) -> None: ...

    def leave(self) -> None: ...


class Run:
    """From the beginning, or from what a run saved last."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        end: float = float("inf"),
        saved: Any = None,
    ):
        self.clock = Clock(end)
        self.machinery = Machinery(config, self.clock)
        self.kept = Kept(self.machinery)
        self.order = PromptOrder(
            [Prompt((1, i % 3), index=i) for i in range(7)], batch_size=2, seed=0
        )
        self.trainer = Algorithm(config).reinforced(
            self.machinery, likes_long, stop=self.clock.over
        )
        parts = {"data": self.order, "trainer": self.trainer}
        self.told: list[int] = []
        self.trainer.callbacks = [
            Evaluate({"": [Prompt((2,))]}, likes_long, every=1, last=STEPS),
            Experiences(self.told),
            JSONLines(folder / "metrics.jsonl"),
            Checkpointing(self.kept, parts, every=100, last=STEPS),
        ]
        if saved is not None:
            restore(self.trainer, parts, read(saved[0]))
            for table, before in zip(self.machinery.tables(), saved[1], strict=True):
                table.data.copy_(before)

    def fit(self) -> "Run":
        self.trainer.fit(self.order, steps=STEPS)
        return self


class Experiences(Observer):
    def __init__(self, told: list[int]):
        self.told = told

    def on_experience(self, trainer: Any, samples: Any, experience: Any) -> None:
        self.told.append(trainer.step)


def likes_long(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    scores = [float(len(rollout.response_ids) > 2) for rollout in rollouts]
    return [{"exact_match": score, "reward": score} for score in scores]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = {"path": str(save_tiny(tmp_path / "model", "qwen3"))}
    rollout = {"engine": "scripted", "samples_per_prompt": 3, "max_response_tokens": 4}
    given = {"model": model, "data": {"train": "nowhere"}, "rollout": rollout}
    monkeypatch.setattr(model_runner, "custom_forward", bigrams)

    @cache
    def config(options: tuple[str, ...]) -> RunConfig:
        return load(given, ["checkpoint.every=100", *options])

    def start(name: str, options: Sequence[str], **how: Any) -> Run:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return Run(folder, copy.deepcopy(config(tuple(options))), **how)

    return start


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(CRITIC, id="critic", marks=pytest.mark.ranks),
        pytest.param(REPLAY, id="replay"),
        pytest.param(REFILL, id="refill", marks=pytest.mark.ranks),
        pytest.param(EARLY, id="early", marks=pytest.mark.ranks),
    ],
)
def test_stopped_anywhere_and_gone_on_with_is_never_stopped(
    options: Sequence[str], start: Any, tmp_path: Path
) -> None:
    whole = start("whole", options).fit()
    expected = lines(tmp_path / "whole")
    assert [line["step"] for line in expected] == list(range(STEPS + 1))
    done = whole.clock.now
    for end in range(2, done):
        first = start(f"{end}", options, end=end).fit()
        assert first.trainer.stopped, end
        assert first.kept.saved or (options is EARLY and end <= 1 + 12), (
            "only where nothing was done there is nothing to save"
        )
        again = start(
            f"{end}", options, saved=first.kept.saved[-1] if first.kept.saved else None
        ).fit()
        assert lines(tmp_path / f"{end}") == expected, end
        for table, other in zip(again.machinery.tables(), whole.machinery.tables(), strict=True):
            assert torch.equal(table, other), end
        assert written(again.trainer.state()) == written(whole.trainer.state()), end
        assert again.order.position == whole.order.position
        if options is not EARLY:  # there a rollout that was broken off begins again
            assert first.clock.now + again.clock.now == done, (
                "something was done twice, or not at all"
            )
        # or trajectories would be those of a step that is still under way
        assert {*first.told, *again.told} == {1, 2}, end
        if options is PLAIN:
            assert len(first.told + again.told) <= 3, (
                "only a step whose evaluation was broken off is told again"
            )


@pytest.mark.parametrize(
    "every", [1, *(pytest.param(n, marks=pytest.mark.ranks) for n in (2, 3, 7))]
)
def test_stopped_again_and_again_it_arrives_all_the_same(
    every: int, start: Any, tmp_path: Path
) -> None:
    whole = start("whole", CRITIC).fit()
    run, stops, begin = start("broken", CRITIC, end=every + 1).fit(), 0, 0
    while run.trainer.stopped:
        begin = len(run.kept.saved) - 1
        run, stops = (
            start("broken", CRITIC, end=every, saved=run.kept.saved[begin]).fit(),
            stops + 1,
        )
    assert stops >= (whole.clock.now - 2) // every - 1
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    assert all(map(torch.equal, run.machinery.tables(), whole.machinery.tables()))


def test_a_step_that_goes_on_otherwise_is_refused(start: Any) -> None:
    """Two of three optimizer steps are done: with two mini-batches there would be nothing left of
    the right ones.
    """
    whole = start("whole", PLAIN).fit()
    before = next(
        first
        for first in (start(f"{end}", PLAIN, end=end).fit() for end in range(2, whole.clock.now))
        if sum("optimizer" in name for name, _ in read(first.kept.saved[-1][0]).get("within", []))
        == 2
    )
    with pytest.raises(
        CheckpointError,
        match="after an optimizer step of the policy, where this run comes to 1 answers",
    ):
        start(
            "other",
            ["algorithm.updates_per_epoch=1", "algorithm.kl.placement=reward", *PLAIN[1:]],
            saved=before.kept.saved[-1],
        ).fit()
    with pytest.raises(
        CheckpointError,
        match="after log-probs of 6 rows, where this run comes to reference log-probs of 6 rows",
    ):
        start(
            "late", ["algorithm.updates_per_epoch=1", *PLAIN[1:]], saved=before.kept.saved[-1]
        ).fit()
    with pytest.raises(
        CheckpointError,
        match="after 6 answers, where this run comes to 8 answers. Go on with the options",
    ):
        start("more", [*PLAIN, "rollout.samples_per_prompt=4"], saved=before.kept.saved[-1]).fit()


def test_a_journal_is_the_same_when_it_was_written_down() -> None:
    routes = torch.tensor([[[1, 0]], [[2, 3]], [[0, 1]], [[1, 2]], [[3, 0]]], dtype=torch.int16)
    completion = Completion((1, 2), (-0.1, -1 / 3), "stop", 4, (3, 4), routes)
    turns = Trajectory.of((5,), Completion((6,), (-2.0,), "length", 4), (7, 8), completion)
    told = Rollout((Trajectory.of((9,), completion), turns), {"reward": 0.1})
    completions = [answered((), (), "length", 4), None, told]
    stats = TokenStats(torch.rand(2, 3), None, torch.ones(2, 3, 1, 2, dtype=torch.uint8))
    journal = Journal()
    for name, result in (
        ("a", completions),
        ("b", stats),
        ("c", {"loss": 0.1}),
        ("d", torch.rand(2, 3)),
        ("e", [None]),
    ):
        journal(name, lambda result=result: result)
    again = Journal()
    again.load_state(read(written(journal.state())))
    assert len(journal) == 5
    same = again("a", list)
    assert same == completions
    assert same[0].trajectories[0].routes.eq(32767).all(), "not known"
    kept = same[2].trajectories[1].routes
    assert kept.dtype == torch.int16 and kept.tolist() == told.trajectories[1].routes.tolist()
    assert same[2].trajectories[1].loss_mask.tolist() == [False, True, False, False, True, True]
    known = again("b", lambda: stats)
    assert torch.equal(known.logp, stats.logp) and torch.equal(known.routes, stats.routes)
    assert known.entropy is None
    assert again("c", dict) == {"loss": 0.1}
    assert again("d", dict).shape == (2, 3)
    assert again("e", list) == [None]
    assert again("f", lambda: 6) == 6, "there it goes on by itself"


def test_answers_of_a_checkpoint_before_format_4_are_rollouts_of_one_turn() -> None:
    packed = {
        "token_ids": torch.tensor([7, 8, 9]),
        "logprobs": torch.tensor([-0.5, -0.25, -1.0], dtype=torch.float64),
        "answers": [[2, "stop", 4, {"reward": 1.0}, []], None, [1, "length", 4, None, [3]]],
        "routes": [None, None],
    }
    journal = Journal()
    journal.load_state([["3 answers so far", packed]])
    prompts = [Prompt((1, 2)), Prompt((3,)), Prompt((4,))]
    inner = Alone(RolloutConfig(max_response_tokens=4), vocabulary=9, stop_ids=[1])
    inner.load_weights([], version=4)
    engine = JournaledEngine(inner, journal)  # type: ignore[arg-type]
    first, asked, last = engine.generate(prompts, seeds=[1, 2, 3], sampling=Sampling(1.0))
    assert first is not None and last is not None
    own = Completion((7, 8), (-0.5, -0.25), "stop", 4)
    assert first == Rollout((Trajectory.of((1, 2), own),), {"reward": 1.0})
    cut = Completion((9,), (-1.0,), "length", 4, (3,))
    assert last == Rollout((Trajectory.of((4,), cut),))
    assert asked == inner.generate([prompts[1]], seeds=[2], sampling=Sampling(1.0))[0]
    again = Journal()
    again.load_state(read(written(journal.state())))  # it can be saved, and goes on from there
    assert JournaledEngine(inner, again).generate(  # type: ignore[arg-type]
        prompts, seeds=[1, 2, 3], sampling=Sampling(1.0)
    ) == [first, asked, last]


def test_a_journal_of_format_4_goes_on() -> None:
    """Trajectories lay behind each other, and log-probs were padded."""
    completions = {
        "token_ids": torch.tensor([1, 2, 7, 3, 8, 9], dtype=torch.int32),
        "loss_mask": torch.tensor([False, False, True, False, True, True]),
        "logprobs": torch.tensor([0.0, 0.0, -0.5, 0.0, -0.25, -1.0]),
        "versions": torch.tensor([-1, -1, 4, -1, 4, 4], dtype=torch.int32),
        "trajectories": [[3, False], [3, True]],
        "routes": [None, None],
        "rollouts": [[1, {"reward": 1.0}], None, [1, None]],
    }
    padded = {"logp": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), "entropy": None}
    journal = Journal()
    journal.load_state([["answers", completions], ["log-probs of 2 rows", padded]])
    first, none, last = journal("answers", list)
    assert first == Rollout(
        (Trajectory.of((1, 2), Completion((7,), (-0.5,), "stop", 4)),), {"reward": 1.0}
    )
    assert none is None
    cut = Completion((8, 9), (-0.25, -1.0), "length", 4)
    assert last == Rollout((Trajectory.of((3,), cut),))
    lengths = torch.tensor([3, 2])
    rows = Rows.of_completions(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 1]), lengths)
    policy = JournaledPolicy(None, journal)  # type: ignore[arg-type]
    assert [row.tolist() for row in policy.log_probs(rows.ragged()).logp] == [[-1.0, -2.0], [-3.0]]


def test_what_nobody_comes_to_is_no_end_of_a_step() -> None:
    journal = Journal()
    journal.load_state([["answers", [1]], ["more answers", [2]]])
    journal.begin()
    assert journal("answers", list) == [1]
    with pytest.raises(
        CheckpointError, match="after more answers, where this run comes to the end of the step"
    ):
        journal.begin()


def test_rollouts_that_do_not_lie_in_their_order_are_read_where_they_lie() -> None:
    completions = [answered((n, n + 1), (-0.5 * n, -1.0), "stop", n) for n in (1, 2, 3)]
    lying = selected(selected(completions, [0, 1, 2]), [2, 0])
    assert list(lying) == [completions[2], completions[0]]
    journal = Journal()
    journal("answers", lambda: lying)
    again = Journal()
    again.load_state(read(written(journal.state())))
    assert list(again("answers", list)) == [completions[2], completions[0]]


def test_all_that_an_environment_told_of_its_rollouts_is_in_the_journal() -> None:
    turns = (Turn("assistant", 1, 2, reward=0.5), Turn("tool", 2, 3, "add"))
    first = Trajectory.of((1,), Completion((2,), (-1.0,), "stop", 3), (4,), turns=turns)
    second = Trajectory.of((1, 9), Completion((5,), (-2.0,), "length", 4))
    several = Rollout((first, second), {"reward": 1.0}, {"found": 1.0}, {"turns": 2.0})
    lost = Rollout((Trajectory.of((1,)),), {}, lost="gone")
    cut = Rollout((second,), {"reward": 0.0}, score_zero=True)
    journal = Journal()
    journal("answers", lambda: [several, None, lost, cut])
    again = Journal()
    again.load_state(read(written(journal.state())))
    assert list(again("answers", list)) == [several, None, lost, cut]


def test_log_probs_of_a_journal_of_format_4_are_told_as_rows_are() -> None:
    """Those of an update that was under way, which were padded."""
    padded = {"logp": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), "entropy": None}
    journal = Journal()
    journal.load_state(
        [
            ["log-probs of 2 rows in their update", padded],
            ["an optimizer step of the policy", {"loss": 1.0, "optimizer_steps": 1.0}],
        ]
    )
    lengths = torch.tensor([3, 2])
    rows = Rows.of_completions(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 1]), lengths)
    told: list[Any] = []
    metrics = take_steps(
        None,  # type: ignore[arg-type]
        given(rows).ragged(),
        None,  # type: ignore[arg-type]
        [torch.arange(2)],
        scored=told.append,
        journal=journal,
    )
    assert [row.tolist() for row in told[0].logp] == [[-1.0, -2.0], [-3.0]]
    assert metrics["loss"] == 1.0


@pytest.mark.parametrize("vocabulary", ["full", "top_k", "sampled"])
def test_what_a_teacher_said_before_a_resume_is_not_asked_again(vocabulary: Any) -> None:
    """But for hidden states, which only teachers give that do not learn."""
    asked: list[int] = []

    class Teacher:
        def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
            asked.append(len(rows))
            counts = rows.mask.sums()
            columns = {
                name: Ragged.packed(torch.randn(int(counts.sum()), *shape).to(kind), counts)
                for name, (kind, shape) in request.columns(4, torch.float32).items()
            }
            return TeacherScores(torch.tensor([True, False]), **columns)

    tokens = Ragged.of([torch.arange(5), torch.arange(3)])
    mask = tokens.shortened().with_values(torch.tensor([False, True, True, True, False, True]))
    rows = Rows(tokens, torch.tensor([2, 2]), tokens.lengths, mask)
    request, journal, resumed = TeacherRequest(vocabulary, 2), Journal(), Journal()
    journal.begin()
    first = JournaledTeacher(Teacher(), journal, 1).teach(rows, request)
    resumed.load_state(copy.deepcopy(journal.state()))
    resumed.begin()
    again = JournaledTeacher(Teacher(), resumed, 1).teach(rows, request)
    assert len(asked) == (2 if vocabulary == "full" else 1)
    if vocabulary == "full":
        return
    assert torch.equal(first.taught, again.taught)
    for name, column in first.columns().items():
        assert torch.equal(column.flat, again.columns()[name].flat)
