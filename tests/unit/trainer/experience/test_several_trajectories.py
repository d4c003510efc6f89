"""Rollouts of several trajectories: they share a reward and an advantage, and weigh once."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftmega.algorithms.aggregation import aggregation_of
from rftmega.algorithms.losses import policy_loss
from rftmega.config import AlgorithmConfig
from rftmega.config.options.algorithms import (
    GAE,
    Clip,
    GroupNorm,
    KLConfig,
    LeaveOneOut,
    Returns,
    TurnNorm,
)
from rftmega.core.errors import InfrastructureFault
from rftmega.core.ragged import Ragged
from rftmega.core.types import (
    Completion,
    Experience,
    Prompt,
    Rollout,
    Samples,
    TokenStats,
    Trajectory,
    Turn,
)
from rftmega.trainer.dynamic_sampler import DynamicSampler
from rftmega.trainer.experience import ExperienceMaker, ReplayBuffer, collect
from rftmega.trainer.group_collector import GroupCollector, Wanted
from rftmega.trainer.prompt_queue import PromptQueue
from rftmega.trainer.replay_mixer import ReplayMixer

Tree = list[list[list[tuple[int, float]]]]
"""Of each rollout, of each trajectory, of each answer: (tokens, reward of the turn)."""
TRAINED = 0.3  # how far the policy has moved, in log-probability


class Scores:
    """Log-probs and values that depend on the token's place alone."""

    def log_probs(self, rows: Any, *, temperature: Any = None) -> TokenStats[Any]:
        return TokenStats(rows.mask.with_values(torch.full((len(rows.mask.flat),), -1.0)), None)

    def reference_log_probs(self, rows: Any) -> TokenStats[Any]:
        flat = -1.0 - 0.01 * torch.arange(len(rows.mask.flat)).float()
        return TokenStats(rows.mask.with_values(flat), None)

    def values(self, rows: Any) -> Ragged:
        return Ragged.of([0.1 * torch.arange(len(row)).float() for row in rows.mask])


def trajectory_of(completions: Sequence[tuple[int, float]]) -> Trajectory:
    """A prompt of two tokens, and answers with a tool's token between them."""
    segments: list[Any] = [(1, 2)]
    turns, length = [], 2
    for place, (tokens, reward) in enumerate(completions):
        if place:
            segments.append((3,))
            length += 1
        segments.append(Completion([7] * tokens, [-1.0] * tokens, "stop", 0))
        turns.append(Turn("assistant", length, length + tokens, reward=reward))
        length += tokens
    return Trajectory.of(*segments, turns=tuple(turns))


def tree_of(seed: int, rollouts: int) -> Tree:
    draw = random.Random(seed)
    return [
        [
            [(draw.randint(1, 4), draw.choice([0.0, 0.5, -1.0])) for _ in range(draw.randint(1, 3))]
            for _ in range(draw.randint(1, 3))
        ]
        for _ in range(rollouts)
    ]


def samples_of(
    tree: Tree, outcomes: Sequence[float], *, size: int, lost: Sequence[int] = ()
) -> Samples[Ragged]:
    rollouts = []
    for place, trajectories in enumerate(tree):
        turns = sum(reward for own in trajectories for _, reward in own)
        scores = {"reward": outcomes[place] + turns, "turns": turns}
        rollout = Rollout(tuple(map(trajectory_of, trajectories)), scores, measures={"turns": 2.0})
        rollouts.append(replace(rollout, lost="gone", scores={}) if place in lost else rollout)
    prompts = [Prompt((1, 2), index=place // size) for place in range(len(tree))]
    return collect(prompts, rollouts, nobody, samples_per_prompt=size)


def nobody(prompts: Any, rollouts: Any) -> Any:
    raise AssertionError("every rollout has its scores")


def made(samples: Samples[Ragged], advantage: Any, critic: Any = None) -> Experience[Ragged]:
    chosen = AlgorithmConfig(advantage=advantage)
    return ExperienceMaker(Scores(), chosen, critic=critic).make(samples)


def normalised(numbers: Sequence[float]) -> list[float]:
    """The formula of GRPO in Python's own numbers."""
    mean = sum(numbers) / len(numbers)
    if len(set(numbers)) == 1:
        return [0.0] * len(numbers)
    deviation = (sum((each - mean) ** 2 for each in numbers) / (len(numbers) - 1)) ** 0.5
    return [(each - mean) / (deviation + 1e-6) for each in numbers]


def of_tokens(tree: Tree, of_turn: Any) -> list[list[float]]:
    """[rows][tokens that the policy chose] of of_turn(rollout, trajectory, answer, token)."""
    return [
        [
            of_turn(r, t, a, token)
            for a, (tokens, _) in enumerate(completions)
            for token in range(tokens)
        ]
        for r, trajectories in enumerate(tree)
        for t, completions in enumerate(trajectories)
    ]


def chosen_of(column: Ragged, mask: Ragged) -> list[list[float]]:
    return [row[own].tolist() for row, own in zip(column, mask, strict=True)]


def close(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    for row, right in zip(found, wanted, strict=True):
        assert row == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_group_compares_rollouts_whatever_number_of_trajectories_they_have(seed: int) -> None:
    tree, outcomes = tree_of(seed, 6), [1.0, 0.0, 0.5, 0.25, 1.0, -1.0]
    samples = samples_of(tree, outcomes, size=3)
    totals = [
        outcome + sum(reward for own in rollout for _, reward in own)
        for outcome, rollout in zip(outcomes, tree, strict=True)
    ]
    wanted = normalised(totals[:3]) + normalised(totals[3:])
    experience = made(samples, GroupNorm())
    close(
        chosen_of(experience.advantage, experience.mask), of_tokens(tree, lambda r, *_: wanted[r])
    )
    left_out = [total - (sum(totals[:3]) - total) / 2 for total in totals[:3]]
    found = made(samples, LeaveOneOut()).advantage
    close(
        chosen_of(found, samples.rows.mask)[: len(sum(tree[:3], []))],
        of_tokens(tree[:3], lambda r, *_: left_out[r]),
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_rollout_that_was_lost_has_no_row_and_is_not_compared(seed: int) -> None:
    tree, outcomes = tree_of(seed, 4), [1.0, 9.0, 0.0, 0.5]
    samples = samples_of(tree, outcomes, size=4, lost=[1])
    kept = [tree[0], tree[2], tree[3]]
    same = samples_of(kept, [1.0, 0.0, 0.5], size=3)
    assert len(samples) == len(sum(kept, []))
    found, wanted = made(samples, GroupNorm()), made(same, GroupNorm())
    close(
        chosen_of(found.advantage, found.mask),
        chosen_of(wanted.advantage, wanted.mask),
    )
    with pytest.raises(InfrastructureFault, match="All 4 rollouts were lost.*gone"):
        samples_of(tree, outcomes, size=4, lost=range(4))


@pytest.mark.parametrize("seed", range(4))
def test_returns_sum_what_later_turns_bring_also_those_of_later_trajectories(seed: int) -> None:
    tree, outcomes = tree_of(seed, 3), [1.0, 0.0, 0.5]
    samples = samples_of(tree, outcomes, size=1)

    def later(r: int, t: int, a: int, token: int) -> float:
        turns = [reward for _, reward in tree[r][t][a:]]
        turns += [reward for own in tree[r][t + 1 :] for _, reward in own]
        return outcomes[r] + sum(turns)

    experience = made(samples, Returns(gamma=1.0))
    close(chosen_of(experience.advantage, experience.mask), of_tokens(tree, later))


def test_generalised_advantages_see_the_rewards_of_turns_where_they_were_given() -> None:
    tree: Tree = [[[(2, 0.5), (1, -1.0)]], [[(1, 0.0)], [(2, 2.0)]]]
    samples = samples_of(tree, [1.0, 0.25], size=1)
    gamma, lam = 0.9, 0.8
    experience = made(samples, GAE(gamma=gamma, lam=lam), critic=Scores())
    rewards = [[0.0, 0.5, -1.0 + 1.0], [0.25 + 2.0], [0.0, 2.0 + 0.25]]
    values = chosen_of(Scores().values(samples.rows), samples.rows.mask)
    wanted = []
    for own, value in zip(rewards, values, strict=True):
        row, running = [], 0.0
        for t in reversed(range(len(own))):
            after = value[t + 1] if t + 1 < len(own) else 0.0
            running = own[t] + gamma * after - value[t] + gamma * lam * running
            row.insert(0, running)
        wanted.append(row)
    close(chosen_of(experience.advantage, experience.mask), wanted)


@pytest.mark.parametrize("seed", range(6))
def test_turns_are_compared_with_all_turns_of_their_group(seed: int) -> None:
    tree, outcomes = tree_of(seed, 6), [1.0, 0.0, 0.5, 0.25, 1.0, -1.0]
    samples = samples_of(tree, outcomes, size=3)
    wanted: dict[tuple[int, int, int], float] = {}
    for group in (range(3), range(3, 6)):
        places = [
            (r, t, a) for r in group for t, own in enumerate(tree[r]) for a in range(len(own))
        ]
        rewards = [tree[r][t][a][1] for r, t, a in places]
        for at, (r, _, _) in enumerate(places):
            if at + 1 == len(places) or places[at + 1][0] != r:
                rewards[at] += outcomes[r]
        normal = dict(zip(places, normalised(rewards), strict=True))
        for place in places:
            wanted[place] = sum(
                value for other, value in normal.items() if other[0] == place[0] and other >= place
            )
    experience = made(samples, TurnNorm())
    found = chosen_of(experience.advantage, experience.mask)
    close(found, of_tokens(tree, lambda r, t, a, _: wanted[r, t, a]))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "sequence_total", "sequence_sum"])
@pytest.mark.parametrize("seed", range(3))
def test_a_rollout_weighs_once_however_its_rows_are_spread_over_micro_batches(
    name: str, seed: int
) -> None:
    tree = tree_of(seed, 5)
    experience = made(samples_of(tree, [1.0, 0.0, 0.5, 0.25, 2.0], size=5), GroupNorm())
    loss_fn = policy_loss(
        options=Clip(low=0.9, high=9.0), aggregation=aggregation_of(name, longest=10)
    )
    total, count = 0.0, 0
    for rows in torch.randperm(len(experience), generator=torch.Generator().manual_seed(seed)):
        part = experience.select(rows[None]).padded()
        assert part.old_logp is not None
        loss = loss_fn(TokenStats(part.old_logp + TRAINED, None), part)
        total += float((loss.value * loss.weight).sum())
        count += int(loss.count)
    surrogate = -float(torch.tensor(TRAINED).exp())
    rollouts = [
        [
            surrogate * value
            for row, rollout in enumerate(experience.rollouts.of_row.tolist())
            if rollout == number
            for value in chosen_of(experience.advantage, experience.mask)[row]
        ]
        for number in range(5)
    ]
    tokens = sum(map(len, rollouts))
    wanted = {
        "token_mean": sum(map(sum, rollouts)) / tokens,
        "sequence_mean": sum(sum(own) / len(own) for own in rollouts) / 5,
        "sequence_total": sum(map(sum, rollouts)) / 5,
        "sequence_sum": sum(sum(own) / 10 for own in rollouts) / 5,
    }[name]
    assert count == (tokens if name == "token_mean" else 5)
    assert total / count == pytest.approx(wanted, abs=1e-5)


def test_metrics_are_means_over_rollouts_and_the_first_answers_are_rollouts_too() -> None:
    tree: Tree = [[[(1, 0.0)], [(2, 0.0)], [(3, 0.0)]], [[(2, 0.0)]], [[(4, 0.0)]], [[(1, 0.0)]]]
    samples = samples_of(tree, [1.0, 0.0, 1.0, 0.0], size=2)
    sampler = DynamicSampler(0, train_samples=1)
    trained, seen = sampler(lambda prompts, wanted: samples, [Prompt((1, 2))] * 2, PromptQueue())
    assert trained.rollouts.sizes.tolist() == [3, 1]
    assert seen["reward"] == 0.5
    assert seen["response_length"] == (6 + 2 + 4 + 1) / 4
    assert seen["environment_turns"] == 2.0


def test_rollouts_stay_apart_when_steps_are_joined_and_together_when_they_are_mixed() -> None:
    first = made(samples_of([[[(1, 0.0)]]], [1.0], size=1), GroupNorm())
    second = made(samples_of([[[(1, 0.0)], [(2, 0.0)]]], [0.0], size=1), GroupNorm())
    joined = Experience.join([first, second, second])
    assert joined.rollouts.sizes.tolist() == [1, 2, 2]
    samples = samples_of([[[(1, 0.0)], [(2, 0.0)]], [[(1, 0.0)]]], [1.0, 0.0], size=2)
    assert Samples.join([samples, samples]).rollouts.sizes.tolist() == [2, 1, 2, 1]
    mixer = ReplayMixer(Scores(), ReplayBuffer(), max_age=3)
    long = made(samples_of([[[(1, 1.0)]] * 5, [[(1, 0.0)]] * 4], [1.0, 0.0], size=2), GroupNorm())
    mixer.keep(long, torch.zeros(9, dtype=torch.int64))
    mixed, _ = mixer.beside(made(samples, GroupNorm()), 1)
    assert sorted(mixed.rollouts.sizes.tolist()) == [1, 2, 4, 5]


def test_the_kl_of_a_leave_one_out_advantage_is_that_of_the_whole_rollout() -> None:
    tree: Tree = [[[(1, 0.0)], [(2, 0.0)]], [[(2, 0.0)]]]
    samples = samples_of(tree, [1.0, 0.0], size=2)
    chosen = AlgorithmConfig(
        advantage=LeaveOneOut(), kl=KLConfig(placement="reward", estimator="k1", coef=0.5)
    )
    found = ExperienceMaker(Scores(), chosen).make(samples)
    apart = Scores().reference_log_probs(samples.rows).logp.flat * -1.0 - 1.0
    own = [row[mask].sum().item() for row, mask in zip(
        samples.rows.mask.with_values(apart), samples.rows.mask, strict=True
    )]  # fmt: skip
    rewards = [1.0 - 0.5 * (own[0] + own[1]), 0.0 - 0.5 * own[2]]
    wanted = [rewards[0] - rewards[1], rewards[1] - rewards[0]]
    close(chosen_of(found.advantage, found.mask), of_tokens(tree, lambda r, *_: wanted[r]))


def test_a_group_of_which_all_was_lost_is_no_good_group_and_ends_nothing() -> None:
    prompts = [Prompt((1, 2), index=place) for place in (0, 0, 1, 1)]
    kept = Rollout((trajectory_of([(1, 0.0)]),), {"reward": 1.0})
    lost = replace(kept, lost="gone", scores={})
    collector = GroupCollector(prompts, nobody, 2)
    enough = collector.until(Wanted(1, lambda samples: True))
    assert not enough([lost, lost, None, None])
    assert enough([lost, lost, kept, lost])
    samples = collector.collected([lost, lost, kept, lost])
    assert samples.group.tolist() == [1]
