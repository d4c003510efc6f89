"""One step, top to bottom; GRPO, PPO and their family are the maker and the learner that it is given."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from rftmega.algorithms.mismatch import log_prob_gap
from rftmega.experience import ExperienceMaker, ModelReward
from rftmega.interfaces import Callback, Resumable, Reward, RolloutEngine, WeightSync
from rftmega.trainer.groups import Groups, Wanted
from rftmega.trainer.learner import Learner
from rftmega.trainer.replaying import Replaying
from rftmega.trainer.sampling import Refill
from rftmega.trainer.supply import Supply
from rftmega.types import Completion, Metrics, Prompt, Samples

Result = TypeVar("Result")


class PPOTrainer:
    """Drives one policy and one engine. `step` counts finished steps and is the version of the engine's weights.

    Of the `samples_per_prompt` answers to a prompt the first `learnt_from` (0: all) are learnt from; all are scored.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        weights: WeightSync,
        reward: Reward,
        maker: ExperienceMaker,
        learner: Learner,
        samples_per_prompt: int,
        temperature: float,
        seed: int,
        refill: Refill | None = None,
        replay: Replaying | None = None,
        model_reward: ModelReward | None = None,
        learnt_from: int = 0,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
    ):
        """`stop` is asked after each step, on every process, and answers alike on all: training ends there where it says so."""
        self.engine, self.weights, self.reward, self.model_reward = engine, weights, reward, model_reward
        self.maker, self.learner = maker, learner
        self.refill, self.replay = refill or Refill(0), replay
        self.learnt_from = learnt_from or samples_per_prompt
        self.samples_per_prompt, self.temperature, self.seed = samples_per_prompt, temperature, seed
        self.callbacks = callbacks
        self.stop, self.stopped = stop, False
        self.supply = Supply()
        self.step = 0
        self.seconds: Metrics = {}  # of each phase of the present step

    def fit(self, batches: Iterable[list[Prompt]], *, steps: int) -> None:
        """Trains until `steps` steps are done, or `stop` says so: then `stopped` is true, for the callbacks of that step, too."""
        self.weights.push(version=self.step)
        start: Metrics = {}
        for callback in self.callbacks:
            callback.on_start(self, start)
        self.supply.source(batches)
        for _, prompts in zip(range(self.step, steps), self.supply, strict=False):  # in this order: draws no batch too many
            metrics = self.train_step(prompts, self.supply)
            self.stopped = self.stop()
            for callback in self.callbacks:
                callback.on_step(self, metrics)
            if self.stopped:
                break
        for callback in self.callbacks:
            callback.on_end(self)

    def state(self) -> dict[str, Any]:
        """What the next step depends on, beside weights, random streams and the order of prompts; as JSON has it."""
        parts: dict[str, Resumable] = {"maker": self.maker, "learner": self.learner, "supply": self.supply, "engine": self.engine}
        if self.replay is not None:
            parts["replay"] = self.replay
        return {"step": self.step} | {name: part.state() for name, part in parts.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on after the step of which this is the `state`."""
        self.step = state["step"]
        self.maker.load_state(state["maker"])
        self.learner.load_state(state["learner"])
        self.supply.load_state(state["supply"])
        self.engine.load_state(state["engine"])
        if self.replay is not None and "replay" in state:  # it may begin with the resumed run
            self.replay.load_state(state["replay"])

    def train_step(self, prompts: Sequence[Prompt], more: Supply) -> Metrics:
        """One step on `prompts`; where groups are replaced, `more` has the prompts for it, and gets back what was not used."""
        samples, seen = self.phase("rollout", self.refill, self.rollout, prompts, more)
        experience = self.phase("score", self.maker.make, samples)
        if self.replay is None:
            metrics = self.phase("update", self.learner.update, experience, self.step)
        else:
            learnt, replayed = self.phase("replay", self.replay.beside, experience, self.step)
            metrics = self.phase("update", self.learner.update, experience, self.step, learnt) | replayed
            self.replay.keep(experience, samples.group)
        self.step += 1
        metrics |= self.phase("push", self.weights.push, version=self.step)
        for callback in self.callbacks:
            callback.on_experience(self, samples, experience)
        metrics |= log_prob_gap(experience.behaviour_logp, experience.old_logp, experience.mask)
        return metrics | seen | {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}

    def rollout(self, prompts: Sequence[Prompt], number: int = 0, wanted: Wanted | None = None) -> Samples:
        """`samples_per_prompt` scored answers a prompt; the same ones whenever this step is run with this seed. `number`: of
        the step's rollouts, which draw differently. With `wanted` it may end with these groups only.
        """
        requests = [prompt for prompt in prompts for _ in range(self.samples_per_prompt)]
        first = (self.seed * 1_000_003 + self.step) * len(requests) + number * 1_640_531_527
        seeds = [(first + i) % 2**31 for i in range(len(requests))]
        # What compares answers with each other can't begin before all are there.
        at_once = None if getattr(self.reward, "whole_groups", False) else self.reward
        groups = Groups(requests, self.reward, self.samples_per_prompt, learnt_from=self.learnt_from)
        completions: Sequence[Completion | None]
        if wanted is None:
            completions = self.engine.generate(requests, seeds=seeds, temperature=self.temperature, reward=at_once)
        else:
            asked = partial(self.engine.generate_until, requests, seeds=seeds, temperature=self.temperature, reward=at_once)
            completions = asked(enough=groups.until(wanted))
        versions = {completion.policy_version for completion in completions if completion is not None}
        assert versions == {self.step}, f"answers of policy {versions} at step {self.step}: a push was missed"
        samples = groups.collected(completions)
        return samples if self.model_reward is None else self.model_reward(samples)

    def phase(self, name: str, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Does the work and tells the callbacks how long it took."""
        begin = time.perf_counter()
        result = work(*args, **kwargs)
        self.seconds[name] = time.perf_counter() - begin
        for callback in self.callbacks:
            callback.on_phase(self, name, self.seconds[name])
        return result
