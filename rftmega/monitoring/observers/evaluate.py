"""Evaluation of a model during training, on prompts that are not trained on, with greedy or sampled
completions and without side effects on the training.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from rftmega.algorithms.pass_at_k import pass_at_k
from rftmega.core.interfaces import Reward, RolloutEngine
from rftmega.core.sampling_seeds import evaluation_seed
from rftmega.core.types import Metrics, Prompt, Rollout, Sampling
from rftmega.monitoring.observers.observer import Observer
from rftmega.trainer.experience import complete, scores_of

ACCURACY = "accuracy"  # share of correct completions


class Answering(NamedTuple):
    """Answering holds the settings of an evaluation: the sampling of completions, the k of pass@k,
    and the reward component that tells correct completions.
    """

    samples: int = 1  # completions per prompt
    sampling: Sampling = Sampling(temperature=0.0)  # noqa: RUF009
    pass_at: tuple[int, ...] = ()  # each k at most `samples`
    # the reward component that is 1 or more for a correct completion
    accuracy: str = "exact_match"


class EvaluationRequest(NamedTuple):
    """EvaluationRequest is a request for completion number `sample` of a prompt of the evaluation set `name`."""

    name: str
    prompt: Prompt
    sample: int


class Evaluated(NamedTuple):
    """Evaluated holds a completion of an evaluation prompt, and what it scored."""

    name: str  # of the evaluation set, "" for a single set
    adapter: str  # the LoRA adapter that was evaluated, "": the policy
    sample: int  # index among the completions of the prompt
    prompt: Prompt
    rollout: Rollout
    scores: Mapping[str, float]  # reward components; empty for a lost rollout


# called on all processes after an evaluation, with the step
Report = Callable[[int, Sequence[Evaluated]], None]


class Evaluation(Observer):
    """Evaluation is the base class of callbacks that evaluate the model at the start of a run,
    after every `every`-th step (0: no step) and after step `last`.
    """

    reports: Sequence[Report] = ()

    def __init__(self, held_out: Mapping[str, Any], *, every: int, last: int):
        """Stores the settings. `held_out`: evaluation sets (prompts or rows) by name; a single set
        may have the name "", see `metric_of`. `every`, `last`: the steps after which the model is
        evaluated.
        """
        self.held_out = held_out
        self.every, self.last = every, last

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        if not trainer.resumed:  # the run evaluated before the resume
            metrics |= self.evaluate(trainer)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        if trainer.step == self.last or (self.every and trainer.step % self.every == 0):
            metrics |= self.evaluate(trainer)

    def evaluate(self, trainer: Any) -> Metrics:
        raise NotImplementedError


class Evaluate(Evaluation):
    """Evaluate is a callback that evaluates the policy: it generates completions of evaluation
    prompts and scores them.
    """

    def __init__(
        self,
        held_out: Mapping[str, Sequence[Prompt]],
        reward: Reward,
        answering: Answering = Answering(),  # noqa: B008  it can't be changed
        *,
        every: int,
        last: int,
        adapters: Sequence[str] = (),
        reports: Sequence[Report] = (),
    ):
        """Stores the settings. `held_out`: evaluation set's name -> its prompts; `reward`: scores
        the completions; `answering`: sampling and metrics; `every`, `last`: the steps after which
        the policy is evaluated; `adapters`: names of LoRA adapters that are evaluated in addition
        to the policy; `reports`: receive all completions of each evaluation.
        """
        super().__init__(held_out, every=every, last=last)
        self.reward, self.answering, self.adapters = reward, answering, adapters
        self.reports = reports

    def evaluate(self, trainer: Any) -> Metrics:
        """Evaluates the policy. Returns for each evaluation set the mean of every reward component
        over all completions, the share of correct completions ("accuracy") and pass@k; and the same
        for each of `adapters`, with the adapter's name in the metric's name.

        "eval_seconds" is the total time of the evaluation.
        """
        begin = time.perf_counter()
        found = self._completed(trainer)
        for adapter in self.adapters:
            # at each evaluation, so that a resumed run finds the same requests in its journal
            with trainer.engine.answering_with(adapter):
                found += self._completed(trainer, adapter)
        for report in self.reports:
            report(trainer.step, found)
        return self._measured(found) | {"eval_seconds": time.perf_counter() - begin}

    def _completed(self, trainer: Any, adapter: str = "") -> list[Evaluated]:
        """Generates and scores completions of all evaluation sets. Returns them set by set, with
        the completions of a prompt next to each other. `adapter`: name of the adapter that the
        engine was told to use, "": the policy.
        """
        requests = [
            EvaluationRequest(name, prompt, sample)
            for name, prompts in self.held_out.items()
            for prompt in prompts
            for sample in range(self.answering.samples)
        ]
        return completed(
            trainer.engine, requests, self.answering.sampling, self.reward, adapter=adapter
        )

    def _measured(self, found: Sequence[Evaluated]) -> Metrics:
        """Returns the metrics of each set and adapter in `found`, with both in their names."""
        metrics: Metrics = {}
        for (adapter, name), own in grouped(found).items():
            parts = judged([each.scores for each in own], self.answering)
            parts |= counted([each.rollout for each in own])
            known = "_".join(filter(None, (adapter, name)))
            metrics |= {metric_of(known, part): value for part, value in parts.items()}
        return metrics


def completed(
    engine: RolloutEngine,
    requests: Sequence[EvaluationRequest],
    sampling: Sampling,
    reward: Reward,
    *,
    adapter: str = "",
) -> list[Evaluated]:
    """Generates and scores the completions of `requests`, each with the seed of its prompt's index
    and its sample number. Returns them in order. `adapter`: name of the adapter that `engine` was
    told to use, "": the policy.
    """
    asked = [each.prompt for each in requests]
    seeds = [evaluation_seed(each.prompt.index, each.sample) for each in requests]
    with undisturbed():
        answered = engine.generate(asked, seeds=seeds, sampling=sampling, reward=reward)
        rollouts = complete(answered)
        scores = scores_of(asked, rollouts, reward)
    return [
        Evaluated(each.name, adapter, each.sample, each.prompt, rollout, score)
        for each, rollout, score in zip(requests, rollouts, scores, strict=True)
    ]


def grouped(found: Sequence[Evaluated]) -> dict[tuple[str, str], list[Evaluated]]:
    """Returns the entries of `found` by (adapter, evaluation set), in their order."""
    groups: dict[tuple[str, str], list[Evaluated]] = {}
    for each in found:
        groups.setdefault((each.adapter, each.name), []).append(each)
    return groups


def judged(scores: Sequence[Mapping[str, float]], answering: Answering) -> Metrics:
    """Returns the mean of every reward component, the share of correct completions ("accuracy"),
    and pass@k ("pass_at_<k>").

    `scores`: the reward components of every completion, with the completions of a prompt next to
    each other; `answering`: the number of completions per prompt, the k, and the component that
    tells correct ones.
    """
    n = answering.samples
    parts = dict.fromkeys(part for score in scores for part in score)
    found = {part: _mean([score[part] for score in scores if part in score]) for part in parts}
    judging = [score for score in scores if answering.accuracy in score]
    if judging:
        found[ACCURACY] = _right(judging, answering.accuracy) / len(judging)
    groups = [scores[i : i + n] for i in range(0, len(scores), n)]
    for k in answering.pass_at:
        # a lost rollout has no score
        scored = [[score for score in group if score] for group in groups]
        chances = [
            pass_at_k(len(group), _right(group, answering.accuracy), k)
            for group in scored
            if len(group) >= k
        ]
        if chances:
            found[f"pass_at_{k}"] = _mean(chances)
    return found


class Measured(Protocol):
    """Measured is the part of a rollout that `counted` reads."""

    @property
    def lost(self) -> str: ...

    @property
    def measures(self) -> Mapping[str, float]: ...


def counted(rollouts: Sequence[Measured]) -> Metrics:
    """Returns the mean of each measure that the environment reported ("environment_<name>") over
    the rollouts that are not lost, and the share of lost rollouts ("lost") if there are any.
    """
    kept = [rollout for rollout in rollouts if not rollout.lost]
    names = dict.fromkeys(name for rollout in kept for name in rollout.measures)
    found = {}
    for name in names:
        numbers = [rollout.measures[name] for rollout in kept if name in rollout.measures]
        found[f"environment_{name}"] = _mean(numbers)
    if len(kept) < len(rollouts):
        found["lost"] = 1 - len(kept) / len(rollouts)
    return found


def _right(scores: Sequence[Mapping[str, float]], part: str) -> int:
    return sum(score.get(part, 0) >= 1 for score in scores)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def metric_of(name: str, part: str) -> str:
    """Returns the full name of a metric of an evaluation. `name`: name of the evaluation set, ""
    for a single set; `part`: the metric's name within a set, such as "accuracy".
    """
    return f"eval_{name}_{part}" if name else f"eval_{part}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager that restores the global random states of Python, NumPy and torch (CPU) at
    its end, so that its block does not change the training's random numbers.
    """
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
