"""Which of the answers are learnt from."""

from collections.abc import Callable, Iterator, Sequence

import torch

from rftmega.algorithms.advantages import varied
from rftmega.types import Metrics, Prompt, Samples

Ask = Callable[[Sequence[Prompt], int], Samples]  # prompts, number of the round -> scored answers


class Refill:
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): groups whose answers all score alike are replaced."""

    def __init__(self, rounds: int, *, part: str = ""):
        """Asks at most `rounds` times more, 0 never; answers are compared by the reward `part`, or by the whole reward."""
        self.rounds, self.part = rounds, part

    def __call__(self, ask: Ask, prompts: Sequence[Prompt], more: Iterator[Sequence[Prompt]]) -> tuple[Samples, Metrics]:
        """As many whole groups as there are prompts, fewer where the rounds (or `more` prompts) run out, but one at least; and
        what all answers were like, left-out ones included.
        """
        found = [ask(prompts, 0)]
        kept = [self._varied(found[0])] if self.rounds else found
        groups = len(prompts) if self.rounds else 0
        while _groups(kept) < groups and len(found) <= self.rounds and (further := next(more, None)) is not None:
            found.append(ask(further, len(found)))
            kept.append(self._varied(found[-1]))
        everything = Samples.join(found)
        seen = _described(everything)
        if not self.rounds:
            return found[0], seen
        seen |= {"refills": float(len(found) - 1), "groups_left_out": float(_groups(found) - _groups(kept))}
        kept = [part for part in kept if len(part)] or [_first(found[0], 1)]  # something must be learnt from
        return _first(Samples.join(kept), groups), seen

    def _varied(self, samples: Samples) -> Samples:
        score = samples.part(self.part) if self.part else samples.reward
        return samples.select(varied(score, samples.group).nonzero()[:, 0])


def _groups(parts: Sequence[Samples]) -> int:
    return sum(len(part.group.unique()) for part in parts)


def _first(samples: Samples, groups: int) -> Samples:
    """The first so many groups."""
    return samples.select(torch.isin(samples.group, samples.group.unique()[:groups]).nonzero()[:, 0])


def _described(samples: Samples) -> Metrics:
    lengths = (samples.rows.lengths - samples.rows.prompt_lengths).double()
    return {
        "reward": samples.reward.mean().item(),
        "response_length": lengths.mean().item(),
        "truncated": samples.truncated.double().mean().item(),
        **{f"reward_{name}": part.nanmean().item() for name, part in samples.reward_parts.items()},
    }
