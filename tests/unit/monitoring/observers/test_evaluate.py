"""Evaluation: what it reports, and that training can't tell whether there was one."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.config import RolloutConfig
from rftmega.core.sampling_seeds import evaluation_seed
from rftmega.core.types import Prompt, Rollout, Sampling, TokenStats
from rftmega.data.sampler import PromptOrder
from rftmega.monitoring.observers.evaluate import Answering, Evaluate
from rftmega.monitoring.observers.evaluation_score import EvaluationScore
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.progress import Progress
from rftmega.rollout.engines import ScriptedEngine
from rftmega.trainer import Learner, PPOTrainer
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.ppo import StepSampling
from tests.rollouts import Alone, answered

EASY, HARD = [Prompt((1,), index=0), Prompt((2,), index=1)], [Prompt((3,), index=0)]


class Completions:
    """An engine that gives the i-th sample of a prompt the token `script[prompt][i]`, and remembers
    how it was asked.
    """

    def __init__(self, script: dict[Prompt, Sequence[int]]):
        self.script = {prompt: iter(tokens) for prompt, tokens in script.items()}
        self.asked: list[tuple[Prompt, int, float]] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        reward: Any = None,
    ) -> list[Rollout]:
        self.asked += [
            (prompt, seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [answered((next(self.script[prompt]),)) for prompt in prompts]


class Trainer:
    """As much of a trainer as an evaluation looks at."""

    step = 0

    def __init__(self, engine: Completions):
        self.engine = engine


def seven(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    right = [float(completion.response_ids == [7]) for completion in rollouts]
    return [{"exact_match": each, "half": each / 2, "reward": each} for each in right]


def test_one_file_is_answered_greedily_once_and_its_metrics_have_no_name() -> None:
    engine = Completions({EASY[0]: [7], EASY[1]: [8]})
    found = Evaluate({"": EASY}, seven, every=0, last=1).evaluate(Trainer(engine))
    assert {name: value for name, value in found.items() if name != "eval_seconds"} == {
        "eval_exact_match": 0.5, "eval_half": 0.25, "eval_reward": 0.5, "eval_accuracy": 0.5,
    }  # fmt: skip
    assert [(prompt, sampling.temperature) for prompt, _, sampling in engine.asked] == [
        (EASY[0], 0.0),
        (EASY[1], 0.0),
    ]


def test_every_named_set_has_its_own_mean_and_pass_at_k() -> None:
    engine = Completions({EASY[0]: [7, 7, 7, 7], EASY[1]: [1, 7, 1, 1], HARD[0]: [1, 1, 7, 7]})
    answering = Answering(samples=4, sampling=Sampling(0.5), pass_at=(1, 2, 4))
    found = Evaluate({"easy": EASY, "hard": HARD}, seven, answering, every=0, last=1).evaluate(
        Trainer(engine)
    )
    expected = {
        "eval_easy_exact_match": 5 / 8, "eval_easy_pass_at_1": 5 / 8, "eval_easy_pass_at_2": (1 + 3 / 6) / 2,
        "eval_easy_pass_at_4": 1.0, "eval_hard_exact_match": 0.5, "eval_hard_pass_at_1": 0.5,
        "eval_hard_pass_at_2": 5 / 6, "eval_hard_pass_at_4": 1.0, "eval_hard_half": 0.25,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {sampling for _, _, sampling in engine.asked} == {Sampling(0.5)}


def test_an_answer_passes_by_the_part_that_is_named() -> None:
    engine = Completions({HARD[0]: [7, 1]})
    answering = Answering(samples=2, sampling=Sampling(1.0), pass_at=(2,), accuracy="half")
    assert (
        Evaluate({"": HARD}, seven, answering, every=0, last=1).evaluate(Trainer(engine))[
            "eval_pass_at_2"
        ]
        == 0
    )


def near(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    """Scores 1 for a 7, less the farther from it; a 0 is no answer."""
    found = [own.response_ids[0] for own in rollouts]
    return [{"near": 1 / (1 + abs(each - 7)), "reward": 0.0} if each else {} for each in found]


def test_accuracy_is_the_share_of_scores_of_1_and_more_and_a_graded_reward_has_a_mean_score(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = Completions({EASY[0]: [7, 8, 9, 0], EASY[1]: [7, 7, 5, 8]})
    answering = Answering(samples=4, sampling=Sampling(0.5), accuracy="near")
    found = Evaluate({"": EASY}, near, answering, every=0, last=1).evaluate(Trainer(engine))
    assert found["eval_accuracy"] == pytest.approx(3 / 7)
    mean = (3 + 2 * 1 / 2 + 2 * 1 / 3) / 7
    assert found["eval_near"] == pytest.approx(mean)
    bar = Progress(1, [EvaluationScore("", "eval_near", "")])
    bar.on_start(Trainer(engine), found)
    bar.on_end(None)
    said = "evaluation before training: mean score 0.667"
    assert capsys.readouterr().out.splitlines() == [said]


def test_a_seed_belongs_to_a_prompt_and_a_sample_whatever_else_is_asked() -> None:
    engine = Completions({prompt: [1] * 12 for prompt in EASY + HARD})
    for sets, samples in (
        ({"a": EASY, "b": HARD}, 3),
        ({"a": EASY}, 3),
        ({"a": EASY}, 2),
        ({"a": EASY}, 2),
    ):
        Evaluate(sets, seven, Answering(samples, Sampling(1.0)), every=0, last=1).evaluate(
            Trainer(engine)
        )
    seeds = [seed for _, seed, _ in engine.asked]
    both, alone, fewer, again = seeds[:9], seeds[9:15], seeds[15:19], seeds[19:]
    assert both[:6] == alone
    assert fewer == again == alone[:2] + alone[3:5]
    assert len(set(alone)) == 6
    assert evaluation_seed(EASY[1].index, 0) in alone


class Counter:
    """Policy and weights of a run whose engine is scripted: what it learns is how often it was
    asked.
    """

    def __init__(self, engine: ScriptedEngine):
        self.engine = engine

    def log_probs(self, rows: Any) -> Any:
        return rows.like(TokenStats(torch.full(rows.padded().mask.shape, -0.5), None))

    reference_log_probs = log_probs

    def step(self, experience: Any, loss_fn: Any) -> dict[str, float]:
        experience = experience.padded()
        return {
            "loss": float((experience.advantage * experience.tokens[:, 1:]).sum()),
            "noise": float(torch.rand(())),
        }

    def push(self, *, version: int) -> dict[str, float]:
        self.engine.load_weights([], version=version)
        return {}


def moody(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    """Draws from every global generator, as a user's reward may."""
    drawn = random.random() + numpy.random.rand() + float(torch.rand(()))
    return [
        {"exact_match": float(sum(c.response_ids) % 2), "reward": drawn + len(c.response_ids)}
        for c in rollouts
    ]


class Notes(Observer):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)


def training(evaluate: bool) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Metrics of four steps without those of evaluation and without timings; and those of
    evaluation.
    """
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    engine = Alone(RolloutConfig(max_response_tokens=6), vocabulary=50, stop_ids=[1])
    policy, notes = Counter(engine), Notes()
    answering = Answering(samples=3, sampling=Sampling(1.0), pass_at=(2,))
    observers = (
        [Evaluate({"": EASY, "hard": HARD}, moody, answering, every=1, last=4)] if evaluate else []
    )
    prompts = [Prompt((i,), index=i) for i in range(5)]
    PPOTrainer(
        engine=engine, weights=policy, reward=moody, maker=ExperienceMaker(policy),
        learner=Learner(policy, policy_loss()), sampling=StepSampling(4, 1.0, seed=0), callbacks=[*observers, notes],
    ).fit(PromptOrder(prompts, batch_size=3, seed=0), steps=4)  # fmt: skip
    timeless = [{k: v for k, v in step.items() if "seconds" not in k} for step in notes.metrics]
    evaluated = [{k: v for k, v in step.items() if k.startswith("eval_")} for step in timeless]
    return [
        {k: v for k, v in step.items() if not k.startswith("eval_")} for step in timeless
    ], evaluated


def test_training_is_the_same_with_and_without_evaluation() -> None:
    without, nothing = training(evaluate=False)
    with_it, evaluated = training(evaluate=True)
    assert with_it == without
    assert all("eval_hard_pass_at_2" in step for step in evaluated)
    assert nothing == [{}] * 4


def test_equal_weights_are_evaluated_equally_at_every_step() -> None:
    _, evaluated = training(evaluate=True)
    assert len({step["eval_exact_match"] for step in evaluated}) == 1, (
        "the scripted engine answers by the seed alone"
    )


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([("", "eval_exact_match", "accuracy")], "accuracy 25.0%"),
        ([(name, f"eval_{name}_x", "accuracy") for name in "abc"], "accuracy of a 50.0%, accuracy of b 75.0%"),
        ([("", "eval_cross_entropy", "cross-entropy")], "cross-entropy 1.23"),
    ],
)  # fmt: skip
def test_progress_shows_the_score_of_each_set(
    scores: list[tuple[str, str, str]], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {
        "eval_exact_match": 0.25,
        "eval_a_x": 0.5,
        "eval_b_x": 0.75,
        "eval_cross_entropy": 1.234,
    }
    bar = Progress(1, [EvaluationScore(*score) for score in scores])
    bar.on_start(Trainer(Completions({})), metrics)
    bar.on_end(None)
    assert capsys.readouterr().out.splitlines() == [f"evaluation before training: {shown}"]


def test_a_score_of_your_own_is_an_accuracy_once_all_its_values_are_0_or_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = EvaluationScore("", "eval_mine", "")
    for means, shares, said in (
        ((0.0, 0.5), (0.0, 0.5), ["mean score 0", "accuracy 50.0%"]),
        ((0.0, 0.5, 1.0), (0.0, 0.25, 1.0), ["mean score 0", "mean score 0.5", "mean score 1"]),
    ):
        bar = Progress(9, [own])
        bar.on_start(SimpleNamespace(step=0), {"eval_mine": means[0], "eval_accuracy": shares[0]})
        for step, (mean, share) in enumerate(zip(means[1:], shares[1:], strict=True), start=1):
            bar.on_step(SimpleNamespace(step=step), {"eval_mine": mean, "eval_accuracy": share})
        bar.on_end(None)
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(": ")[2] for line in lines] == said


class Several(Completions):
    """An engine with other adapters than the policy's: 5 is the answer of "first", 9 of "base"."""

    adapter = ""
    chosen: list[str]

    @contextmanager
    def answering_with(self, adapter: str) -> Iterator[None]:
        self.adapter = adapter
        yield
        self.adapter = ""

    def generate(self, prompts: Sequence[Prompt], **given: Any) -> list[Rollout]:
        self.chosen.append(self.adapter)
        token = {"": 7, "first": 5, "base": 9}[self.adapter]
        return [answered((token,)) for _ in prompts]


def test_frozen_adapters_are_asked_and_told_beside_the_policys_at_each_evaluation() -> None:
    def tokens(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        return [{"token": float(rollout.trajectories[0].token_ids[-1])} for rollout in rollouts]

    engine = Several({})
    engine.chosen = []
    evaluation = Evaluate(
        {"easy": EASY, "hard": HARD}, tokens, every=1, last=2, adapters=("first", "base")
    )
    for _ in range(2):
        metrics = evaluation.evaluate(Trainer(engine))
        del metrics["eval_seconds"]
        assert metrics == {
            "eval_easy_token": 7, "eval_hard_token": 7,
            "eval_first_easy_token": 5, "eval_first_hard_token": 5,
            "eval_base_easy_token": 9, "eval_base_hard_token": 9,
        }  # fmt: skip
    assert engine.chosen == ["", "first", "base"] * 2
