"""Environment of a multi-turn game: guess which of 7 numbers is the secret one. The prompt is the
smallest of them; each reply tells whether the secret number is smaller or larger. Binary search
finds it in three turns.

A turn's reward is the information that it gains, as a share of all bits, plus 1 if it is the secret
number. So turns are compared with turns (`algorithm.advantage: turn_norm`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from rftmega.config.options.parts import EnvironmentPart, implements
from rftmega.core.interfaces import Model
from rftmega.core.types import Completion, Prompt, Rollout, Trajectory, Turn

NUMBERS = 7


@dataclass(frozen=True)
class Guess(EnvironmentPart):
    """A number is guessed within a few turns."""

    type: Literal["guess"] = "guess"

    turns: int = 3
    """Maximum number of guesses."""


@implements(Guess)
class GuessEnvironment:
    """GuessEnvironment asks for guesses until one is right, or all turns are used."""

    def __init__(self, options: Guess, tokenizer: Any):
        self.options, self.tokenizer = options, tokenizer

    async def run(self, task: Prompt, model: Model) -> Rollout:
        secret = int(task.label)
        first = int(self.tokenizer.decode(task.token_ids))
        low, high = first, first + NUMBERS - 1  # remaining range
        segments: list[Any] = [task.token_ids]
        context: tuple[int, ...] = task.token_ids
        turns: list[Turn] = []
        for number in range(self.options.turns):
            completion = await model.generate(context, max_tokens=2)  # number and end token
            segments.append(completion)
            end = len(context) + len(completion.token_ids)
            guess = self._number(completion)
            found = guess == secret
            before = high - low + 1
            if found:
                low = high = secret
            elif guess is not None and secret < guess:
                high = min(high, guess - 1)
            elif guess is not None:
                low = max(low, guess + 1)
            told = math.log2(before / (high - low + 1)) / math.log2(NUMBERS)
            reward = told + found
            turns.append(Turn("assistant", len(context), end, reward=reward))
            if found or guess is None or number + 1 == self.options.turns:
                break
            reply = self.tokenizer.encode_said("<" if secret < guess else ">")
            turns.append(Turn("user", end, end + len(reply)))
            segments.append(reply)
            context = (*context, *completion.token_ids, *reply)
        trajectory = Trajectory.of(*segments, turns=tuple(turns))
        guesses = sum(turn.role == "assistant" for turn in turns)
        return Rollout(
            (trajectory,),
            rewards={"found": float(found)},
            measures={"turns": float(guesses)},
        )

    def _number(self, completion: Completion) -> int | None:
        """Returns the guess; None if the completion is not a number or was truncated."""
        if completion.finish_reason == "length":
            return None
        text = self.tokenizer.decode(completion.token_ids).strip()
        return int(text) if text.isdecimal() else None
