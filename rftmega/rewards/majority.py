"""Rewards agreement with the majority's answer in place of a label (TTRL, arXiv:2504.16084, section
2), for prompts without labels.
"""

from collections.abc import Sequence

from rftmega.core.types import Prompt, Rollout
from rftmega.rewards.answer import answer_of
from rftmega.rewards.reasoning import Reasoning
from rftmega.rewards.vote import vote_rewards


class MajorityReward:
    """1 for answers that the most answers to the same prompt agree with, see `vote_rewards`.

    Reads no label.
    """

    whole_groups = True

    def __init__(self, reasoning: Reasoning, size: int, pattern: str = ""):
        """`reasoning` reads responses; one that doesn't finish its reasoning does not vote. `size`:
        answers a prompt. `pattern`: of what in a response votes, see `answer_of`; raises ConfigError
        where it is no regular expression.
        """
        self.reasoning, self.size, self.answer_of = reasoning, size, answer_of(pattern)

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        """Scores whole groups: the answers to a prompt side by side.

        The part's name is "majority".
        """
        assert len(rollouts) % self.size == 0, (
            f"{len(rollouts)} answers are no whole groups of {self.size}"
        )
        answers = [self._answer(rollout) for rollout in rollouts]
        groups = [answers[begin : begin + self.size] for begin in range(0, len(answers), self.size)]
        scores = [score for group in vote_rewards(groups) for score in group]
        return [{"majority": score, "reward": score} for score in scores]

    def _answer(self, rollout: Rollout) -> str | None:
        graded = self.reasoning.read(rollout.context_ids, rollout.response_ids).graded
        return None if graded is None else self.answer_of(graded)
