"""Options of speculative decoding in rollouts (`rollout.speculative`)."""

from dataclasses import dataclass
from typing import Literal

from rftmega.config.options.bounds import Count, PositiveBelowOne


@dataclass(frozen=True)
class NoDrafts:
    """No speculative decoding: one token per completion and engine step."""

    type: Literal["none"] = "none"

    @property
    def draft_tokens(self) -> int:
        """Returns 0, the number of tokens of a draft."""
        return 0


@dataclass(frozen=True)
class LookupDrafts:
    """Drafts without a model: the tokens that followed when the last tokens of a completion
    occurred before, in its context, in other completions of its prompt, or of other prompts.
    """

    type: Literal["lookup"] = "lookup"

    draft_tokens: Count = 6
    """Maximum number of drafted tokens per completion and engine step; drafts that are rejected
    often become shorter.
    """

    least_acceptance: PositiveBelowOne = 0.4
    """Draft only tokens that are accepted with at least this estimated probability. Where there
    are none, nothing is drafted.
    """

    most_rows: Count = 64
    """Draft only in engine steps with at most this many completions: with more of them, a device
    has no spare compute.
    """


@dataclass(frozen=True)
class DraftModel:
    """Drafts of a smaller model with the same tokenizer, which is not trained."""

    type: Literal["draft_model"] = "draft_model"

    path: str = ""
    """Hugging Face folder of the draft model."""

    draft_tokens: Count = 4
    """Number of drafted tokens per completion and engine step."""
