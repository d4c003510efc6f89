"""DynamicSampler selects the groups of completions to train on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rftmega.algorithms.groups import deviations, varied
from rftmega.core import expert_routes
from rftmega.core.interfaces import Host, OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.types import Metrics, Prompt, Samples
from rftmega.trainer.group_collector import Wanted
from rftmega.trainer.prompt_queue import PromptQueue

Ask = Callable[[Sequence[Prompt], Wanted | None], Samples[Ragged]]
"""Generates and scores completions of the prompts; the samples' `group` is the index of the prompt
among these prompts. Given a Wanted, generation ends once enough groups are good, and unfinished
groups are missing.
"""


class DynamicSampler:
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): replaces groups whose completions all have
    the same reward.
    """

    def __init__(
        self,
        rounds: int,
        *,
        part: str = "",
        oversample: float = 1.0,
        train_samples: int = 0,
        host: Host | None = None,
    ):
        """Samples at most `rounds` further times (0: never); completions are compared by the reward
        component `part`, or by the total reward if it is "".

        With `oversample` above 1 each round requests `oversample` times as many prompts as a step
        has, and ends when it has enough groups. The first `train_samples` (0: all) completions of
        each group are compared and trained on; metrics cover all completions. `host`: stores the
        joined samples, one copy per host.
        """
        self.rounds, self.part, self.oversample = rounds, part, oversample
        self.train_samples = train_samples
        self.host = host or OneProcess()

    def __call__(
        self, ask: Ask, prompts: Sequence[Prompt], more: PromptQueue
    ) -> tuple[Samples[Ragged], Metrics]:
        """Returns the samples of as many whole groups (all completions of a prompt) as there are
        `prompts`: the first groups with mixed rewards, in order; and metrics of all completions,
        including left-out ones.

        Returns fewer groups if the rounds (or the prompts in `more`, the queue of further prompts)
        run out, but at least one. `ask` generates and scores completions.

        Prompts whose groups were unfinished, or had mixed rewards but were not needed, return to
        the head of `more`.
        """
        if not self.rounds:
            samples = ask(prompts, None)
            return self.trained(samples), described([samples])
        groups, size = len(prompts), math.ceil(self.oversample * len(prompts))
        asked = [*prompts, *more.take(size - groups)]
        found: list[Samples[Ragged]] = []
        kept: list[Samples[Ragged]] = []
        left_out, back = 0, list[Prompt]()
        while asked and len(found) <= self.rounds and (missing := groups - groups_in(kept)):
            answered = ask(asked, Wanted(missing, self._good) if self.oversample > 1 else None)
            good = self._varied(answered)
            found.append(answered)
            kept.append(_first(good, missing))
            left_out += groups_in([answered]) - groups_in([good])
            used = {*answered.group.tolist()} - (
                {*good.group.tolist()} - {*kept[-1].group.tolist()}
            )
            # always empty except in the last round
            back = [prompt for place, prompt in enumerate(asked) if place not in used]
            asked = (
                more.take(size) if groups_in(kept) < groups and len(found) <= self.rounds else []
            )
        more.put_back(back)
        seen = described(found) | {
            "refills": float(len(found) - 1),
            "groups_left_out": float(left_out),
        }
        if self.oversample > 1:
            seen["groups_put_back"] = float(len(back))
        # a step needs at least one group to train on
        kept = [part for part in kept if len(part)] or [_first(self.trained(found[0]), 1)]
        return Samples.join(kept, self.host.once), seen

    def good(self, samples: Samples[Ragged]) -> Samples[Ragged]:
        """Returns the groups of `samples` that may be trained on (those with mixed rewards, or all
        groups if dynamic sampling is off), for a schedule that chooses the groups of a step itself.
        """
        return self._varied(samples) if self.rounds else self.trained(samples)

    def _good(self, samples: Samples[Ragged]) -> bool:
        return len(self._varied(samples)) > 0

    def trained(self, samples: Samples[Ragged]) -> Samples[Ragged]:
        """Returns the first `train_samples` completions of each group (0: all); a group's rows must
        be adjacent.
        """
        if not self.train_samples:
            return samples
        rollouts = samples.rollouts
        _, sizes = samples.group[rollouts.first].unique_consecutive(return_counts=True)
        begins = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        early = torch.arange(len(begins)) - begins < self.train_samples
        return samples.select(early[rollouts.of_row].nonzero()[:, 0])

    def _varied(self, samples: Samples[Ragged]) -> Samples[Ragged]:
        samples = self.trained(samples)
        score = samples.part(self.part) if self.part else samples.reward
        return samples.select(varied(score, samples.group).nonzero()[:, 0])


def groups_in(parts: Sequence[Samples[Ragged]]) -> int:
    """Returns the number of groups (prompts) in `parts`; groups of different parts are distinct."""
    return sum(len(part.group.unique()) for part in parts)


def _first(samples: Samples[Ragged], groups: int) -> Samples[Ragged]:
    return samples.select(
        torch.isin(samples.group, samples.group.unique()[:groups]).nonzero()[:, 0]
    )


def described(found: Sequence[Samples[Ragged]]) -> Metrics:
    """Returns the metrics of all completions in `found`, such as mean reward and length, averaged
    over rollouts; all rows of a rollout have the same reward and measures.
    """
    rollouts = [samples.rollouts for samples in found]
    sums = [
        own.sums(samples.rows.mask.sums()) for own, samples in zip(rollouts, found, strict=True)
    ]
    lengths = torch.cat(sums).double()
    found = [samples.select(own.first) for own, samples in zip(rollouts, found, strict=True)]
    truncated = torch.cat([samples.truncated for samples in found])
    spread = torch.cat([deviations(samples.reward, samples.group) for samples in found])
    differ = torch.cat([varied(samples.reward, samples.group) for samples in found])
    metrics = {
        "reward": torch.cat([samples.reward for samples in found]).mean().item(),
        "spread": spread.mean().item(),
        "varied": differ.double().mean().item(),
        "response_length": lengths.mean().item(),
        "generated_tokens": lengths.sum().item(),
        "truncated": truncated.double().mean().item(),
    }
    for name in dict.fromkeys(name for samples in found for name in samples.reward_parts):
        part = torch.cat([samples.part(name) for samples in found])
        metrics[f"reward_{name}"] = part.nanmean().item()
    for name in dict.fromkeys(name for samples in found for name in samples.measures):
        counted = torch.cat([samples.measured(name) for samples in found])
        metrics[f"environment_{name}"] = counted.nanmean().item()
    if told := [routes for samples in found if (routes := samples.rows.routes) is not None]:
        metrics["routes_known"] = torch.cat(list(map(known, told))).double().mean().item()
    return metrics


def known(routes: Ragged) -> Tensor:
    """Returns [tokens] bool: True for tokens whose expert routes the engine reported."""
    first = replace(routes, values=routes.values[:, 0, 0])  # a view: routes are large
    return first.flat != expert_routes.unknown(routes.values.dtype)
