"""Majority-vote reward (TTRL, arXiv:2504.16084, section 2) for prompts without labels."""

from collections.abc import Sequence

from rftmega.core.types import Prompt, Rollout
from rftmega.rewards.answer import answer_of
from rftmega.rewards.reasoning import Reasoning
from rftmega.rewards.vote import vote_rewards


class MajorityReward:
    """MajorityReward scores 1 for completions whose answer is the most frequent one among the
    completions of the same prompt, else 0 (see `vote_rewards`). It needs no labels.
    """

    whole_groups = True

    def __init__(self, reasoning: Reasoning, size: int, pattern: str = ""):
        """`reasoning` separates a response from its reasoning; a response with unfinished reasoning
        does not vote. `size`: completions per prompt. `pattern`: regular expression that extracts
        the answer that votes, see `answer_of`. Raises ConfigError if `pattern` is not a regular
        expression.
        """
        self.reasoning, self.size, self.answer_of = reasoning, size, answer_of(pattern)

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        """Scores whole groups: the `size` completions of each prompt must be next to each other.

        Returns one dict per rollout, with the score as "majority" and as "reward".
        """
        assert len(rollouts) % self.size == 0, (
            f"{len(rollouts)} completions are no whole groups of {self.size}"
        )
        answers = [self._answer(rollout) for rollout in rollouts]
        groups = [answers[begin : begin + self.size] for begin in range(0, len(answers), self.size)]
        scores = [score for group in vote_rewards(groups) for score in group]
        return [{"majority": score, "reward": score} for score in scores]

    def extracted(self, prompt: Prompt, graded: str) -> dict[str, str | None]:
        """Returns {"majority": the answer that votes}; None if there is none. `graded`: a response
        without reasoning.
        """
        return {"majority": self.answer_of(graded)}

    def _answer(self, rollout: Rollout) -> str | None:
        graded = self.reasoning.read(rollout.context_ids, rollout.response_ids).graded
        return None if graded is None else self.answer_of(graded)
