"""ExperienceMaker turns samples into an Experience: it computes log-probs and values with the
models, and advantages from the rewards.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rftmega.algorithms import kl
from rftmega.algorithms.advantages import RewardComponent, Scored, advantages, whitened
from rftmega.algorithms.kl import KLController
from rftmega.algorithms.shaping import Shaping
from rftmega.config import AlgorithmConfig
from rftmega.core.interfaces import Host, OneProcess, Scorer, ValueScorer
from rftmega.core.ragged import Ragged
from rftmega.core.teacher_scores import TeacherScores
from rftmega.core.types import Experience, Metrics, RowsOfRollouts, Samples
from rftmega.trainer.experience.teachers import (
    AskedTeacher,
    advantage_of,
    logp_of,
    prompts_of,
)


class ExperienceMaker:
    """ExperienceMaker adds advantages, the trainer's old log-probs, the critic's values and, if the
    KL coefficient is positive, the reference's log-probs to samples.
    """

    def __init__(
        self,
        policy: Scorer,
        chosen: AlgorithmConfig | None = None,
        *,
        critic: ValueScorer | None = None,
        kl_weight: KLController | None = None,
        shape: Shaping | None = None,
        host: Host | None = None,
    ):
        """`chosen`: options that select the advantage estimator, whitening, the placement of the
        KL, and whether truncated completions are left out of the loss (they still count in their
        group); None: GRPO without a KL. `kl_weight`: the adaptive KL coefficient; None: the
        constant coefficient of `chosen`. `shape` changes the rewards from which advantages are
        computed. `host`: stores the experience, one copy per host.
        """
        self.teachers: Sequence[AskedTeacher] = ()  # are asked about every batch
        self.measured: Metrics = {}  # of the teachers, for the latest samples
        self.host = host or OneProcess()
        self.policy, self.critic = policy, critic
        self.chosen = chosen or AlgorithmConfig()
        settings = self.chosen.kl
        self.use_reference = settings.coef > 0
        in_reward = settings.placement == "reward" and self.use_reference
        self.kl_in_reward = (kl_weight or KLController(settings.coef)) if in_reward else None
        self.kl = kl.ESTIMATORS[settings.estimator]
        self.shape = shape or Shaping(longest=0)

    def state(self) -> dict[str, Any]:
        """Returns the running reward moments, on which later experiences depend, as JSON."""
        return {"moments": None if self.shape.moments is None else list(self.shape.moments.state)}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.shape.moments is not None and state["moments"] is not None:
            self.shape.moments.state = tuple(state["moments"])

    def make(self, samples: Samples[Ragged], *, old_log_probs: bool = True) -> Experience[Ragged]:
        """Returns the experience of `samples`. With `old_log_probs` False its old log-probs are
        None and the policy is not called: the update's own forward pass provides them. That
        requires that the KL is not in the reward.
        """
        rows, mask = samples.rows, samples.rows.mask
        stats = self.policy.log_probs(rows) if old_log_probs else None
        old = None if stats is None else stats.logp
        reference = self.policy.reference_log_probs(rows).logp if self.use_reference else None
        value = self.critic.values(rows) if self.critic is not None else None
        rollouts = samples.rollouts
        reward = self.shape(samples.reward[rollouts.first], rollouts.sums(mask.sums()))
        group = samples.group[rollouts.first]
        taught = mask
        if self.chosen.drop_truncated:
            taught = self.host.once(lambda: _without(mask, samples.truncated))

        def estimated() -> tuple[Ragged, Ragged | None]:
            penalty = None
            if self.kl_in_reward is not None and reference is not None:
                assert old is not None, "a KL in the reward needs log-probs before the update"
                distance = self.kl(old.flat - reference.flat)
                penalty = old.with_values(self.kl_in_reward.value * distance)
            turns = turn_rewards(samples)
            parts = self._parts(samples) if self.chosen.advantage.needs_parts else None
            scored = Scored(reward, group, mask, value, penalty, rollouts, turns, parts)
            advantage = advantages(scored, self.chosen.advantage)
            if value is None:
                return self._finished(advantage, taught), None
            returns = advantage.with_values(advantage.flat + value.flat)
            return self._finished(advantage, taught), returns

        advantage, returns = self.host.once(estimated)
        scores = self._scores(samples, taught)
        advantage = self._with_teachers(advantage, scores, taught, old)
        share, leads = self.host.once(lambda: shares_of(rollouts, taught))
        return Experience(
            tokens=rows.tokens,
            prompt_lengths=rows.prompt_lengths,
            lengths=rows.lengths,
            mask=taught,
            behaviour_logp=samples.behaviour_logp,
            old_logp=old,
            reference_logp=reference,
            advantage=advantage,
            old_value=value,
            returns=returns,
            entropy=None if stats is None else stats.entropy,
            versions=samples.versions,
            images=rows.images,
            rollout=rollouts.of_row,
            share=share,
            leads=leads,
            routes=stats.routes if rows.routes is None and stats is not None else rows.routes,
            teachers=tuple(
                own for own, each in zip(scores, self.teachers, strict=True) if each.in_loss
            ),
            teacher_logp={
                each.name: self.host.once(partial(logp_of, own, taught))
                for own, each in zip(scores, self.teachers, strict=True)
            },
            teacher_prompts={
                each.name: self.host.once(partial(prompts_of, each.number, samples))
                for each in self.teachers
                if each.chosen.prompt and self.chosen.replay.max_age
            },
        )

    def _scores(self, samples: Samples[Ragged], taught: Ragged) -> list[TeacherScores]:
        """Returns the scores of each teacher, and measures what they take."""
        found = []
        self.measured = {}
        for teacher in self.teachers:
            begin = time.perf_counter()
            scores = teacher.scores(samples, taught, self.host)
            self.measured[f"{teacher.name}_seconds"] = time.perf_counter() - begin
            rows = scores.taught.float().mean().item() if len(scores) else 0.0
            self.measured[f"{teacher.name}_rows"] = rows
            found.append(scores)
        return found

    def _with_teachers(
        self,
        advantage: Ragged,
        scores: Sequence[TeacherScores],
        taught: Ragged,
        old: Ragged | None,
    ) -> Ragged:
        """Returns the advantages with those that teachers add to them."""
        added = [
            (teacher, own)
            for teacher, own in zip(self.teachers, scores, strict=True)
            if not teacher.in_loss
        ]
        if not added:
            return advantage
        assert old is not None, "a log-ratio in the advantage needs log-probs before the update"

        def summed() -> Ragged:
            parts = [advantage_of(each.chosen, own, taught, old).flat for each, own in added]
            return advantage.with_values(advantage.flat + torch.stack(parts).sum(0))

        return self.host.once(summed)

    def _parts(self, samples: Samples[Ragged]) -> dict[str, RewardComponent]:
        """Returns the reward's components with a weight, of each completion."""
        first = samples.rollouts.first
        kinds = [samples.prompts[row].kind for row in first.tolist()]
        found = {}
        for name, score in samples.reward_parts.items():
            weight = torch.tensor([self.shape.weight_in(kind, name) for kind in kinds])
            if weight.any():
                found[name] = RewardComponent(score[first], weight)
        return found

    def _finished(self, advantage: Ragged, taught: Ragged) -> Ragged:
        if not self.chosen.whiten:
            return advantage
        return advantage.with_values(whitened(advantage.flat, taught.flat))


def turn_rewards(samples: Samples[Ragged]) -> Ragged | None:
    """Returns the environment's turn rewards as a Ragged, each at the target that ended its turn;
    None if there are no turn rewards.
    """
    given = [
        (row, turn.stop - 2, turn.reward)  # its last token is target stop - 2
        for row, turns in enumerate(samples.turns)
        for turn in turns
        if turn.reward
    ]
    if not given:
        return None
    mask = samples.rows.mask
    found = torch.zeros(len(mask.flat))
    begins = mask.lengths.cumsum(0) - mask.lengths
    for row, place, reward in given:
        found[int(begins[row]) + place] += reward
    return mask.with_values(found)


def shares_of(rollouts: RowsOfRollouts, taught: Ragged) -> tuple[Tensor, Tensor]:
    """Returns each row's share of its rollout's trained tokens ([B] float32), and a mask ([B] bool)
    that is True for the first row with trained tokens of each rollout. `taught`: mask of trained
    tokens.
    """
    own = taught.sums()
    whole = rollouts.sums(own)[rollouts.of_row]
    before = own.cumsum(0) - own
    earlier = before - before[rollouts.first][rollouts.of_row]
    return own / whole.clamp(min=1), (own > 0) & (earlier == 0)


def _without(mask: Ragged, rows: Tensor) -> Ragged:
    """Returns the token mask with all tokens of `rows` ([B] bool) set to False."""
    return mask.with_values(mask.flat & mask.spread(~rows))
