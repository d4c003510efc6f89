"""Earlier answers in the real step, on the table of `test_step`."""

from typing import Any

import torch

from rftmega.config import load
from rftmega.core.types import Experience, TokenStats
from rftmega.monitoring.observers.observer import Observer
from rftmega.trainer import Algorithm, PPOTrainer
from rftmega.trainer.ppo import StepParts, StepSampling
from tests.unit.monitoring.observers.test_checkpointing import read, written
from tests.unit.trainer.test_step import ROOT, Bigrams, Diary, Prompt, likes_seven

MILD = ["algorithm.importance_sampling=token", "algorithm.importance_sampling.cap=3"]


class Watched(Bigrams):
    """Notes what it learnt from."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Experience] = []

    def step(self, experience: Any, loss_fn: Any, **beside: Any) -> dict[str, float]:
        self.trained.append(experience.padded())
        table = self.table.detach().clone()
        metrics = super().step(experience, loss_fn, **beside)
        # a small step: groups go on to differ
        self.table.data = table + (self.table.data - table) / 20
        return metrics


class Fresh(Observer):
    def __init__(self) -> None:
        self.seen: list[Experience] = []

    def on_experience(self, trainer: Any, samples: Any, experience: Any) -> None:
        assert len(samples) == len(experience)
        self.seen.append(experience.padded())


def run(*overrides: str, steps: int = 4) -> tuple[Watched, Fresh, Diary, PPOTrainer]:
    config = load(
        ROOT / "examples/arithmetic/grpo.yaml",
        [*MILD, *overrides, "rollout.max_response_tokens=8", "algorithm.updates_per_epoch=1"],
    )
    policy, algorithm, fresh, said = Watched(), Algorithm(config), Fresh(), Diary()
    trainer = PPOTrainer(
        engine=policy, weights=policy, reward=likes_seven, maker=algorithm.maker(policy), learner=algorithm.learner(policy),
        parts=StepParts(replay=algorithm.replay(policy)), sampling=StepSampling(32, 1.0, seed=0), callbacks=[fresh, said],
    )  # fmt: skip
    trainer.fit([[Prompt((1, 2)), Prompt((3,))]] * steps, steps=steps)
    return policy, fresh, said, trainer


def age_of(experience: Experience, step: int) -> torch.Tensor:
    """[B] in steps; answers have one token here."""
    assert experience.versions is not None
    return step - experience.versions[experience.mask]


def ages(experience: Experience, step: int) -> list[int]:
    return sorted(set(age_of(experience, step).tolist()))


def test_a_step_learns_from_answers_up_to_the_staleness_and_scores_them_anew() -> None:
    policy, fresh, said, _ = run("algorithm.replay.max_age=2")
    assert [ages(trained, step) for step, trained in enumerate(policy.trained)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
    ]
    rows = [len(trained) for trained in policy.trained]
    assert rows == [64, 128, 192, 192]
    assert [metrics["replay_rows"] for metrics in said.metrics[1:]] == [0, 64, 128, 128]
    assert [metrics["replay_groups_dropped"] for metrics in said.metrics[1:]] == [0, 0, 0, 2]
    assert [metrics["replay_staleness"] for metrics in said.metrics[1:]] == [0, 1, 1.5, 1.5]
    fresh_ones = [age_of(trained, step) == 0 for step, trained in enumerate(policy.trained)]
    assert [int(ones[: len(ones) // 2].sum()) for ones in fresh_ones] == [32, 32, 32, 32], (
        "each mini-batch has its share"
    )
    second, before = policy.trained[1].select((~fresh_ones[1]).nonzero()[:, 0]), fresh.seen[0]
    assert torch.equal(second.behaviour_logp, before.behaviour_logp), "what their own engine said"
    assert torch.equal(second.advantage, before.advantage)
    assert not torch.allclose(second.old_logp, before.old_logp), "the policy has moved"
    with torch.no_grad():
        moved = (second.old_logp - second.behaviour_logp)[second.mask].exp()
    assert moved.max() > 1.01
    new = policy.trained[1].select(fresh_ones[1].nonzero()[:, 0])
    assert torch.allclose(new.old_logp[new.mask], new.behaviour_logp[new.mask], atol=1e-6)


def test_the_gradient_of_earlier_answers_is_that_of_importance_sampling() -> None:
    """At the start of an update: sum over tokens of (present over sampling probability) x advantage
    x grad log p.
    """
    policy, _, _, trainer = run(
        "algorithm.replay.max_age=1",
        "algorithm.importance_sampling.cap=1000",
        "algorithm.kl.coef=0",
        steps=2,
    )
    given = policy.trained[1]
    weights = Bigrams()
    # The policy that step 1 began with: its log-probs were old_logp. Any table with these gives the
    # same gradient at them.
    weights.table = torch.zeros(16, 16, requires_grad=True)
    logp = weights.logp(given.rows)
    shifted = given.old_logp + (logp - logp.detach())  # the value of then, the gradient of a table
    loss = trainer.learner.loss_fn(TokenStats(shifted, None), given)
    (gradient,) = torch.autograd.grad((loss.value * loss.weight).sum() / loss.count, weights.table)
    expected = torch.zeros(16, 16, dtype=torch.float64)
    completions = torch.zeros(len(given)).masked_fill(given.mask.any(-1), 1.0).sum().item()
    for row in range(len(given)):
        for column in given.mask[row].nonzero()[:, 0].tolist():
            token, target = int(given.tokens[row, column]), int(given.tokens[row, column + 1])
            ratio = (given.old_logp[row, column] - given.behaviour_logp[row, column]).double().exp()
            slope = -torch.full((16,), 1 / 16, dtype=torch.float64)
            slope[target] += 1
            # answers of one token
            expected[token] -= ratio * given.advantage[row, column].double() * slope / completions
    assert torch.allclose(gradient.double(), expected, atol=1e-6)


def test_groups_that_teach_nothing_are_not_kept_and_a_limit_keeps_the_youngest() -> None:
    _, _, said, trainer = run("algorithm.replay.max_age=3", "algorithm.replay.max_rows=64", steps=4)
    assert [metrics["replay_rows"] for metrics in said.metrics[1:]] == [0, 64, 64, 64]
    assert [metrics["replay_groups_dropped"] for metrics in said.metrics[1:]] == [0, 0, 2, 2]
    assert trainer.replay is not None
    fresh = trainer.rollout([Prompt((1, 2)), Prompt((3,))])
    experience = trainer.maker.make(fresh)
    for row in (fresh.group == 0).nonzero()[:, 0].tolist():
        experience.advantage[row].zero_()
    trainer.replay.buffer.groups.clear()
    trainer.replay.keep(experience, fresh.group)
    assert [int(group.tokens[0][0]) for group in trainer.replay.buffer.groups] == [3]


def test_a_resumed_run_learns_from_the_same_earlier_answers() -> None:
    *_, whole = run("algorithm.replay.max_age=2", steps=2)
    *_, again = run("algorithm.replay.max_age=2", steps=1)
    again.load_state(read(written(whole.state())))
    assert whole.replay is not None and again.replay is not None
    assert len(again.replay.buffer) == len(whole.replay.buffer) == 128
    assert written(again.state()) == written(whole.state())


def test_without_it_nothing_is_kept() -> None:
    policy, _, said, trainer = run(steps=2)
    assert trainer.replay is None
    assert "replay_rows" not in said.metrics[1]
    assert [len(trained) for trained in policy.trained] == [64, 64]
