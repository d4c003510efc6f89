"""A whole GRPO step in one plain process: a bigram table is policy enough, a seeded generator
engine enough.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import pstdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.losses import policy_loss
from rftmega.config import load
from rftmega.core.types import (
    COUNT,
    Completion,
    Prompt,
    Rollout,
    Rows,
    Sampling,
    TokenStats,
    TokenValues,
)
from rftmega.monitoring.observers.evaluate import Evaluate
from rftmega.monitoring.observers.observer import Observer
from rftmega.trainer import Algorithm, DynamicSampler, Learner, PPOTrainer
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.ppo import StepParts, StepSampling
from tests.rollouts import answered, rollout_of

WORDS = 16
ROOT = Path(__file__).parents[3]


class Bigrams:
    """Policy, weights and engine in one."""

    def __init__(self) -> None:
        self.table = torch.zeros(WORDS, WORDS, requires_grad=True)
        self.versions: list[int] = []

    def logp(self, rows: Rows) -> Tensor:
        return (
            self.table[rows.tokens[:, :-1]]
            .log_softmax(-1)
            .gather(-1, rows.tokens[:, 1:, None])[..., 0]
        )

    def log_probs(self, rows: Any) -> Any:
        return rows.like(TokenStats(self.logp(rows.padded()).detach(), None))

    def reference_log_probs(self, rows: Any) -> Any:
        tokens = rows.padded().tokens
        every = torch.zeros_like(self.table).log_softmax(-1)[tokens[:, :-1]]
        return rows.like(TokenStats(every.gather(-1, tokens[:, 1:, None])[..., 0], None))

    def step(self, experience: Any, loss_fn: Any) -> dict[str, float]:
        experience = experience.padded()
        loss = loss_fn(TokenStats(self.logp(experience.rows), None), experience)
        (gradient,) = torch.autograd.grad((loss.value * loss.weight).sum() / loss.count, self.table)
        self.table.data -= 20 * gradient
        return {"loss": 0.0}

    def push(self, *, version: int) -> dict[str, float]:
        self.versions.append(version)
        return {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        enough: Any = None,
        **asked: Any,
    ) -> list[Rollout | None]:
        """One after another, as the first nobody waited for."""
        found: list[Rollout | None] = [None] * len(prompts)
        for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            found[place] = rollout_of(prompt, self._completion(prompt, seed, sampling))
            if enough is not None and enough(found):
                break
        return found

    def _completion(self, prompt: Prompt, seed: int, sampling: Sampling) -> Completion:
        logp = self.table[prompt.token_ids[-1]].detach().log_softmax(-1)
        rng = torch.Generator().manual_seed(seed)
        token = (
            int(torch.multinomial(logp.exp(), 1, generator=rng))
            if sampling.temperature
            else int(logp.argmax())
        )
        return Completion((token,), (float(logp[token]),), "length", self.versions[-1])


class Values:
    """A critic: one number a word."""

    def __init__(self) -> None:
        self.table = torch.zeros(WORDS, requires_grad=True)
        self.updates = 0

    def values(self, rows: Any) -> Any:
        return rows.like(TokenValues(self.table.detach()[rows.padded().tokens[:, :-1]])).value

    def step(self, experience: Any, loss_fn: Any) -> dict[str, float]:
        self.updates += 1
        experience = experience.padded()
        loss = loss_fn(TokenValues(self.table[experience.tokens[:, :-1]]), experience)
        (gradient,) = torch.autograd.grad((loss.value * loss.weight).sum() / loss.count, self.table)
        self.table.data -= gradient
        return {"loss": 0.0}


def likes_seven(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    hits = [float(rollout.response_ids == [7]) for rollout in rollouts]
    return [{"exact_match": hit, "reward": hit} for hit in hits]


class Diary(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.metrics: list[dict[str, float]] = []

    def on_start(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.said.append("start")
        self.metrics.append(metrics)

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None:
        self.said.append(name)

    def on_rollouts(self, trainer: Any, samples: Any) -> None:
        assert len(samples.reward) == len(samples.prompts)
        self.said.append(f"rollouts after {trainer.step}")

    def on_experience(self, trainer: Any, samples: Any, experience: Any) -> None:
        last = experience.tokens.at(experience.prompt_lengths - 1)
        assert [prompt.token_ids[-1] for prompt in samples.prompts] == last.tolist()
        self.said.append(f"experience {trainer.step}")

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.said.append(f"step {trainer.step}")
        self.metrics.append(metrics)

    def on_end(self, trainer: Any) -> None:
        self.said.append("end")


def train(steps: int, seed: int = 0) -> tuple[Bigrams, Diary]:
    policy, diary = Bigrams(), Diary()
    prompts = [Prompt((1, 2)), Prompt((3,))]
    PPOTrainer(
        engine=policy, weights=policy, reward=likes_seven, maker=ExperienceMaker(policy),
        learner=Learner(policy, policy_loss()), sampling=StepSampling(16, 1.0, seed=seed),
        callbacks=[Evaluate({"": prompts}, likes_seven, every=2, last=steps), diary],
    ).fit([prompts] * (steps + 5), steps=steps)  # fmt: skip
    return policy, diary


def test_rewarded_tokens_become_likelier() -> None:
    policy, diary = train(30)
    assert policy.table.softmax(-1)[2, 7] > 0.9
    assert diary.metrics[0]["eval_exact_match"] == 0
    assert diary.metrics[-1]["eval_exact_match"] == 1
    assert diary.metrics[-1]["reward"] > 0.8


RECIPES = sorted(path.stem for path in (ROOT / "rftmega/config/recipes").glob("*.yaml"))
UNLIKE = ("dapo", "ppo", "reinforce_pp")  # they reach the most code


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(x, marks=[] if x in UNLIKE else [pytest.mark.ranks]) for x in RECIPES],
)
def test_every_recipe_learns(recipe: str) -> None:
    config = load(
        ROOT / "examples/arithmetic/grpo.yaml",
        [f"algorithm.recipe={recipe}", "rollout.max_response_tokens=8"],
    )
    policy, algorithm, critic = Bigrams(), Algorithm(config), Values() if recipe == "ppo" else None
    # Where only groups that differ are left, one miss among hits is far from their mean, and the
    # table's rate throws it over.
    steps = 6 if config.algorithm.dynamic_sampling.max_rounds else 40
    PPOTrainer(
        engine=policy, weights=policy, reward=likes_seven, maker=algorithm.maker(policy, critic),
        learner=algorithm.learner(policy, critic),
        parts=StepParts(refill=algorithm.refill()),
        sampling=StepSampling(16, 1.0, seed=0), callbacks=[],
    ).fit([[Prompt((1, 2)), Prompt((3,))]] * 400, steps=steps)  # fmt: skip
    assert policy.table.softmax(-1)[2, 7] > 0.8
    if critic is not None:
        assert critic.table[2] > 0.5, "what a state is worth has been learnt"


def test_a_step_is_rollout_score_update_push_and_each_push_has_the_next_version() -> None:
    policy, diary = train(2)
    step = ["rollout", "score", "update", "push"]
    assert diary.said == [
        "start",
        "rollout",
        "rollouts after 0",
        *step[1:],
        "experience 1",
        "step 1",
        "rollout",
        "rollouts after 1",
        *step[1:],
        "experience 2",
        "step 2",
        "end",
    ]
    assert policy.versions == [0, 1, 2]
    assert {f"seconds_{phase}" for phase in step} <= diary.metrics[1].keys()


def test_a_step_with_more_prompts_than_it_needs_learns_from_whole_groups_and_asks_the_others_next() -> (
    None
):
    class Odd:
        """The answers to every other prompt differ."""

        whole_groups = False

        def __call__(
            self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
        ) -> list[dict[str, float]]:
            return [
                {"reward": float(prompt.index % 2 * place)} for place, prompt in enumerate(prompts)
            ]

    seen: list[tuple[list[int], int]] = []

    class Watched(Observer):
        def on_experience(self, trainer: Any, samples: Any, experience: Any) -> None:
            assert bool((experience.mask.sums() > 0).all()), "a row without tokens reached the loss"
            assert samples.group.unique(return_counts=True)[1].tolist() == [4, 4]
            seen.append(([prompt.index for prompt in samples.prompts[::4]], len(samples)))

    policy, said = Bigrams(), Diary()
    prompts = [Prompt((1, 2), index=n) for n in range(40)]
    PPOTrainer(
        engine=policy, weights=policy, reward=Odd(), maker=ExperienceMaker(policy),
        learner=Learner(policy, policy_loss()), sampling=StepSampling(4, 1.0, seed=0),
        parts=StepParts(refill=DynamicSampler(1, oversample=3.0)), callbacks=[Watched(), said],
    ).fit([prompts[n : n + 2] for n in range(0, 40, 2)], steps=3)  # fmt: skip
    assert seen == [([1, 3], 8), ([5, 7], 8), ([9, 11], 8)], (
        "prompts 4 and 5 had been asked for in the first step already"
    )
    for metrics in said.metrics[1:]:
        assert (metrics["refills"], metrics["groups_left_out"], metrics["groups_put_back"]) == (
            0,
            2,
            2,
        )


def test_the_engine_and_the_trainer_agree_so_the_gap_is_nothing() -> None:
    assert all(metrics["logprob_gap_max"] < 1e-6 for metrics in train(3)[1].metrics[1:])


def test_requests_are_ordered_by_the_lengths_of_earlier_answers() -> None:
    class Notes(Bigrams):
        def __init__(self) -> None:
            super().__init__()
            self.expected: list[list[float]] = []

        def generate(self, prompts: Sequence[Prompt], **asked: Any) -> list[Rollout | None]:
            self.expected.append(list(asked["expected_lengths"]))
            return super().generate(prompts, **asked)

    policy = Notes()
    algorithm = Algorithm(load(ROOT / "examples/arithmetic/grpo.yaml"))
    trainer = PPOTrainer(
        engine=policy, weights=policy, reward=likes_seven, maker=algorithm.maker(policy),
        learner=algorithm.learner(policy), sampling=StepSampling(2, 1.0, seed=0),
    )  # fmt: skip
    trainer.fit([[Prompt((1, 2, 3)), Prompt((4, 5))]] * 2, steps=2)
    assert policy.expected == [[3, 3, 2, 2], [1, 1, 1, 1]], "every answer has one token"


def test_a_checkpoint_before_format_4_has_the_lengths_as_the_engines() -> None:
    _, _, first = learner_of()
    _, _, again = learner_of()
    prompts = [Prompt((1, 2, 3)), Prompt((4,))]
    first.lengths.learn(prompts, [answered((5,) * 7), answered((5,) * 3)])
    state = first.state()
    state["engine"] = state.pop("lengths")
    again.load_state(state)
    assert again.lengths.expected(prompts) == [7, 3]


def test_the_seed_decides_everything() -> None:
    tables = [train(3, seed)[0].table for seed in (0, 0, 1)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_evaluation_takes_the_mean_of_a_part_over_the_prompts_that_it_scores() -> None:
    class Engine:
        def generate(self, prompts: Sequence[Prompt], **how: Any) -> list[Rollout]:
            return [answered((n,)) for n in range(len(prompts))]

    def by_kind(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        return [
            {"reward": float(c.response_ids[0]), **({"odd": 1.0} if c.response_ids[0] % 2 else {})}
            for c in rollouts
        ]

    found = Evaluate({"": [Prompt((1,))] * 4}, by_kind, every=0, last=1).evaluate(
        SimpleNamespace(engine=Engine())
    )
    assert {name: found[name] for name in ("eval_reward", "eval_odd")} == {
        "eval_reward": 1.5,
        "eval_odd": 1.0,
    }


def test_evaluation_happens_before_after_and_in_between() -> None:
    evaluated = [
        i for i, metrics in enumerate(train(5)[1].metrics) if "eval_exact_match" in metrics
    ]
    assert evaluated == [0, 2, 4, 5]


def learner_of(*overrides: str) -> tuple[Bigrams, Values, Any]:
    config = load(ROOT / "examples/arithmetic/grpo.yaml", ["algorithm.recipe=ppo", *overrides])
    policy, critic, algorithm = Bigrams(), Values(), Algorithm(config)
    trainer = PPOTrainer(
        engine=policy, weights=policy, reward=likes_seven, maker=algorithm.maker(policy, critic),
        learner=algorithm.learner(policy, critic), sampling=StepSampling(4, 1.0, seed=0),
    )  # fmt: skip
    return policy, critic, trainer


def test_a_frozen_policy_stays_while_the_critic_learns() -> None:
    policy, critic, trainer = learner_of(
        "critic.warmup_steps=2",
        "algorithm.kl.target=1",
        "algorithm.kl.horizon=10",
        "algorithm.updates_per_epoch=1",
    )
    trainer.fit([[Prompt((1, 2))]] * 2, steps=2)
    assert policy.table.abs().sum() == 0
    assert critic.updates == 2
    assert policy.versions == [0, 1, 2], "the engine's version goes on"
    assert trainer.learner.kl.value == 0.001, (
        "what can not move says nothing about the weight of the KL"
    )
    # an answer of four is one in sixteen times rewarded
    trainer.fit([[Prompt((1, 2))]] * 10, steps=12)
    assert policy.table.abs().sum() > 0


def test_the_weight_of_the_kl_in_the_reward_follows_its_target() -> None:
    policy, _, trainer = learner_of("algorithm.kl.target=1e-9", "algorithm.kl.horizon=10")
    said = Diary()
    trainer.callbacks = [said]
    trainer.fit([[Prompt((1, 2))]] * 20, steps=20)
    coefs = [metrics["kl_coef"] for metrics in said.metrics[1:]]
    factors = [round(after / before, 9) for before, after in itertools.pairwise(coefs)]
    assert coefs[0] == 0.001
    assert factors[0] == 0.92, "nothing has moved, which is below the target"
    assert factors[-1] == 1.08


def test_answers_that_were_cut_off_can_be_left_out_of_the_loss_but_not_of_their_group() -> None:
    policy, _, trainer = learner_of()
    policy.push(version=0)
    samples = trainer.rollout([Prompt((1, 2))])
    assert samples.truncated.all()
    config = load(ROOT / "examples/arithmetic/grpo.yaml", ["algorithm.drop_truncated=true"])
    kept = replace(
        samples,
        truncated=torch.tensor([True, False, False, True]),
        reward=torch.tensor([1.0, 0.0, 0.0, 0.0]),
    )
    experience = Algorithm(config).maker(policy).make(kept).padded()
    assert experience.mask[:, 1].tolist() == [False, True, True, False]
    assert experience.advantage[1, 1] < 0


def test_of_each_prompts_answers_the_first_are_trained_from_and_all_are_there_to_be_compared() -> (
    None
):
    class AllAtOnce:
        whole_groups = True
        seen = 0

        def __call__(
            self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
        ) -> list[dict[str, float]]:
            self.seen = len(rollouts)
            return likes_seven(prompts, rollouts)

    policy, reward = Bigrams(), AllAtOnce()
    policy.push(version=0)
    trainer = PPOTrainer(
        engine=policy, weights=policy, reward=reward, maker=ExperienceMaker(policy),
        learner=Learner(policy, policy_loss()), sampling=StepSampling(5, 1.0, seed=0),
        parts=StepParts(refill=DynamicSampler(0, train_samples=2)),
    )  # fmt: skip
    prompts = [Prompt((1, 2)), Prompt((3,))]
    samples, seen = trainer.refill(trainer.rollout, prompts, trainer.supply)
    assert reward.seen == 10
    assert samples.group.tolist() == [0, 0, 1, 1]
    everything = trainer.rollout(prompts)
    assert torch.equal(everything.rows.tokens.padded()[[0, 1, 5, 6]], samples.rows.tokens.padded())
    assert everything.reward.mean() != samples.reward.mean(), (
        "or metrics of the first two would be those of all"
    )
    lengths = [len(completion) for completion in completions_of(everything)]
    assert seen["generated_tokens"] == sum(lengths)
    assert seen["response_length"] == pytest.approx(sum(lengths) / 10)
    assert seen["reward"] == pytest.approx(everything.reward.mean().item())
    assert seen["truncated"] == pytest.approx(everything.truncated.float().mean().item())
    groups = everything.reward.double().reshape(2, 5).tolist()
    assert seen["spread"] == pytest.approx(sum(pstdev(group) for group in groups) / 2)
    assert seen["varied"] == sum(len(set(group)) > 1 for group in groups) / 2


def completions_of(samples: Any) -> list[list[int]]:
    rows = samples.rows
    begins = rows.prompt_lengths.tolist()
    return [row[begin:].tolist() for row, begin in zip(rows.tokens, begins, strict=True)]


def test_counts_of_critic_and_policy_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, trainer = learner_of("algorithm.updates_per_epoch=1")
    for model, tokens in ((Bigrams, 3.0), (Values, 5.0)):
        plain = model.step
        monkeypatch.setattr(
            model,
            "step",
            lambda *given, plain=plain, tokens=tokens: plain(*given) | {f"{COUNT}tokens": tokens},
        )
    diary = Diary()
    trainer.callbacks = [diary]
    trainer.fit([[Prompt((1, 2))]], steps=1)
    assert trainer.counts == {"tokens": 8.0}
    assert not [name for name in diary.metrics[-1] if name.startswith(COUNT)]
