"""Rewards that a rule decides. Every rule sees the response only, never the prompt."""

import re
from collections.abc import Callable, Sequence

from rftmega.config import RewardConfig
from rftmega.errors import ConfigError
from rftmega.types import Completion, Prompt


def exact_match(response: str, label: str) -> float:
    """1 where the response is the label, surrounding white space aside."""
    return float(response.strip() == label.strip())


def matches_format(response: str, pattern: re.Pattern[str]) -> float:
    """1 where the whole response matches."""
    return float(pattern.fullmatch(response.strip()) is not None)


class RuleReward:
    """The weighted sum of exact match and format."""

    def __init__(self, config: RewardConfig, decode: Callable[[Sequence[int]], str]):
        """Raises ConfigError where reward.format_pattern is no regular expression."""
        self.config = config
        self.decode = decode
        try:
            self.pattern = re.compile(config.format_pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"reward.format_pattern={config.format_pattern!r} is no regular expression: {error}") from error

    def __call__(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        response = self.decode(completion.token_ids)
        parts = {"exact_match": exact_match(response, prompt.label)}
        if self.config.format:
            parts["format"] = matches_format(response, self.pattern)
        total = self.config.exact_match * parts["exact_match"] + self.config.format * parts.get("format", 0.0)
        return parts | {"reward": total}
