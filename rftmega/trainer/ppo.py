"""One step, top to bottom; GRPO and its family are the maker and the loss that it is given."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rftmega.algorithms.mismatch import log_prob_gap
from rftmega.experience import ExperienceMaker, collect
from rftmega.interfaces import Callback, Policy, Reward, RolloutEngine, WeightSync
from rftmega.types import Experience, LossFn, Metrics, Prompt, Samples

Result = TypeVar("Result")


class PPOTrainer:
    """Drives one policy and one engine. `step` counts finished steps and is the version of the engine's weights."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        policy: Policy,
        weights: WeightSync,
        reward: Reward,
        maker: ExperienceMaker,
        loss_fn: LossFn,
        samples_per_prompt: int,
        temperature: float,
        seed: int,
        callbacks: Sequence[Callback] = (),
    ):
        self.engine, self.policy, self.weights = engine, policy, weights
        self.reward, self.maker, self.loss_fn = reward, maker, loss_fn
        self.samples_per_prompt, self.temperature, self.seed = samples_per_prompt, temperature, seed
        self.callbacks = callbacks
        self.step = 0
        self.seconds: Metrics = {}  # of each phase of the present step

    def fit(self, batches: Iterable[list[Prompt]], *, steps: int) -> None:
        """Trains until `steps` steps are done."""
        self.weights.push(version=self.step)
        start: Metrics = {}
        for callback in self.callbacks:
            callback.on_start(self, start)
        for _, prompts in zip(range(self.step, steps), batches, strict=False):  # in this order: draws no batch too many
            metrics = self.train_step(prompts)
            for callback in self.callbacks:
                callback.on_step(self, metrics)
        for callback in self.callbacks:
            callback.on_end(self)

    def train_step(self, prompts: Sequence[Prompt]) -> Metrics:
        samples = self.phase("rollout", self.rollout, prompts)
        experience = self.phase("score", self.maker.make, samples)
        metrics = self.phase("update", self.policy.update, experience, self.loss_fn)
        self.step += 1
        metrics |= self.phase("push", self.weights.push, version=self.step)
        return metrics | self.describe(samples, experience)

    def rollout(self, prompts: Sequence[Prompt]) -> Samples:
        """`samples_per_prompt` scored answers a prompt; the same ones whenever this step is run with this seed."""
        requests = [prompt for prompt in prompts for _ in range(self.samples_per_prompt)]
        first = (self.seed * 1_000_003 + self.step) * len(requests)
        seeds = [(first + i) % 2**31 for i in range(len(requests))]
        completions = self.engine.generate(requests, seeds=seeds, temperature=self.temperature)
        versions = {completion.policy_version for completion in completions}
        assert versions == {self.step}, f"answers of policy {versions} at step {self.step}: a push was missed"
        return collect(requests, completions, self.reward, samples_per_prompt=self.samples_per_prompt)

    def phase(self, name: str, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Does the work and tells the callbacks how long it took."""
        begin = time.perf_counter()
        result = work(*args, **kwargs)
        self.seconds[name] = time.perf_counter() - begin
        for callback in self.callbacks:
            callback.on_phase(self, name, self.seconds[name])
        return result

    def describe(self, samples: Samples, experience: Experience) -> Metrics:
        """What the rollout was like."""
        response_lengths = (samples.rows.lengths - samples.rows.prompt_lengths).double()
        return {
            "reward": samples.reward.mean().item(),
            "response_length": response_lengths.mean().item(),
            "truncated": samples.truncated.double().mean().item(),
            **{f"reward_{name}": part.nanmean().item() for name, part in samples.reward_parts.items()},
            **log_prob_gap(experience.behaviour_logp, experience.old_logp, experience.mask),
            **{f"seconds_{name}": seconds for name, seconds in self.seconds.items()},
        }
