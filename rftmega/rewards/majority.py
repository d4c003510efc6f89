"""The majority's answer in place of a label (TTRL, arXiv:2504.16084, section 2): learning where nobody knows what is right."""

from collections.abc import Sequence

from rftmega.rewards.answer import answer_of
from rftmega.rewards.part import Decode
from rftmega.rewards.vote import vote_rewards
from rftmega.types import Completion, Prompt


class MajorityReward:
    """1 for answers that the most answers to the same prompt agree with, see `vote_rewards`. Reads no label."""

    whole_groups = True

    def __init__(self, decode: Decode, pattern: str = ""):
        """`pattern`: of what in a response votes, see `answer_of`; raises ConfigError where it is no regular expression."""
        self.decode, self.answer_of = decode, answer_of(pattern)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[dict[str, float]]:
        """Of whole groups: the answers to a prompt side by side. The part's name is "majority"."""
        groups: list[list[str | None]] = []
        before = None
        for prompt, completion in zip(prompts, completions, strict=True):
            if prompt is not before:
                groups.append([])
            groups[-1].append(self.answer_of(self.decode(completion.token_ids)))
            before = prompt
        scores = [score for group in vote_rewards(groups) for score in group]
        return [{"majority": score, "reward": score} for score in scores]
