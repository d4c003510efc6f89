"""Combines reward components into one weighted sum."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rftmega.config import RewardConfig
from rftmega.core.errors import RewardError
from rftmega.core.types import Prompt, Rollout
from rftmega.rewards.part import Answer, Decode, Part, Undecided
from rftmega.rewards.reasoning import Reasoning

ALWAYS = (
    "exact_match"  # scored for every prompt with a label, even without weight: evaluation shows it
)
TURNS = "turns"  # the environment's turn rewards, with weight 1
MAY_BE_UNDECIDED = ("math", "code", "judge", "task_library")
OF_ALL = "format"  # sees reasoning, which its pattern may match


def weights_of(config: RewardConfig, kind: str) -> dict[str, float]:
    """Returns component name -> weight for prompts of the task type `kind`, without weights of 0.

    Raises RewardError for a task type that reward.recipe lacks.
    """
    if config.recipe and kind not in config.recipe:
        raise RewardError(f"{unknown_kind(config, kind)}.")
    given = config.recipe[kind] if config.recipe else config.weights()
    return {name: weight for name, weight in given.items() if weight}


def unknown_kind(config: RewardConfig, kind: str) -> str:
    return (
        f"reward.recipe holds no kind {kind!r}, only {', '.join(map(repr, sorted(config.recipe)))}: add it, or correct the "
        "prompt's kind (data.kind_key says where it is read)"
    )


def parts_of(config: RewardConfig) -> set[str]:
    """Returns the names of all components that score at least one task type, including exact_match,
    which is always scored.
    """
    return {ALWAYS}.union(*(weights_of(config, kind) for kind in config.recipe or [""]))


class MixedReward:
    """MixedReward computes a rollout's reward as the weighted sum of components; components and
    weights depend on the prompt's task type.

    It has no mutable state, so threads may share it if its components allow that.
    """

    def __init__(
        self,
        config: RewardConfig,
        parts: Mapping[str, Part],
        decode: Decode,
        reasoning: Reasoning | None = None,
        extractors: Mapping[str, Callable[[str], str | None]] | None = None,
    ):
        """`parts`: component name -> component, at least for the names in `parts_of(config)`.
        `decode` converts token ids to text. `reasoning`: separates responses from their reasoning;
        None: `Reasoning.plain`. `extractors`: component name -> function that returns the answer
        that the component reads in a response; for the components that read one.
        """
        self.extractors = extractors or {}
        self.config, self.parts = config, parts
        self.reasoning = reasoning or Reasoning.plain(decode)
        self._own = {*config.function_names(), *config.custom}

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        """Returns one dict per rollout, name -> score: of the components of its prompt's task type,
        of exact_match if the prompt has a label, and of the environment; "reward" is their weighted
        sum.

        Raises RewardError for a task type that the recipe lacks, a component that fails or a score
        that is not finite.
        """
        pairs = zip(prompts, rollouts, strict=True)
        answers = [self._answer(prompt, rollout) for prompt, rollout in pairs]
        weights = [weights_of(self.config, prompt.kind) for prompt in prompts]
        scores: list[dict[str, float]] = [{} for _ in answers]
        for name, part in self.parts.items():
            rows = [
                row
                for row, asked in enumerate(weights)
                if name in asked or (name == ALWAYS and answers[row].label)
            ]
            values = self._values(name, part, [answers[row] for row in rows])
            for row, value in zip(rows, values, strict=True):
                if value is None:
                    continue
                if not math.isfinite(value):
                    raise RewardError(
                        f"The reward part {name} gave {value} for prompt {prompts[row].index}: not a finite number."
                    )
                scores[row][name] = float(value)
                if name in MAY_BE_UNDECIDED:
                    scores[row][f"{name}_undecided"] = float(isinstance(value, Undecided))
        for row, rollout in enumerate(rollouts):
            given = self._given(rollout, prompts[row])
            scores[row] |= given
            weights[row] = weights[row] | {name: self._weight(name) for name in given}
            if rollout.score_zero:
                scores[row] = dict.fromkeys(scores[row], 0.0)
        for row, asked in enumerate(weights):
            if asked and not scores[row].keys() & asked:
                raise RewardError(
                    f"No part of the reward applies to prompt {prompts[row].index}: {', '.join(asked)} gave None. "
                    "One of them must give a number."
                )
        return [
            score | {"reward": sum(asked.get(name, 0.0) * value for name, value in score.items())}
            for score, asked in zip(scores, weights, strict=True)
        ]

    def extracted(self, prompt: Prompt, graded: str) -> dict[str, str | None]:
        """Returns component name -> the answer that it reads in `graded`, a response without
        reasoning, None if there is none; for the components of the prompt's task type that read
        one.
        """
        asked = weights_of(self.config, prompt.kind)
        return {name: read(graded) for name, read in self.extractors.items() if name in asked}

    def _values(self, name: str, part: Part, answers: Sequence[Answer]) -> Sequence[float | None]:
        """Returns the scores of the component `part` with the name `name`. Built-in components are
        not called for responses with unfinished reasoning, which score 0.
        """
        if name in self._own:
            return part(answers) if answers else []
        finished = [
            answer if name == OF_ALL else replace(answer, response=answer.graded)
            for answer in answers
            if answer.graded is not None
        ]
        given = iter(part(finished) if finished else [])
        return [0.0 if answer.graded is None else next(given) for answer in answers]

    def _given(self, rollout: Rollout, prompt: Prompt) -> dict[str, float]:
        """Returns name -> reward that the environment gave to a rollout, with the sum of its turn
        rewards as "turns".

        Raises RewardError if a reward is not finite or has the name of a component.
        """
        given = dict(rollout.rewards)
        turns = [turn.reward for own in rollout.trajectories for turn in own.turns if turn.reward]
        if turns:
            given[TURNS] = sum(turns)
        for name, value in given.items():
            if name in self.parts or name == "reward":
                raise RewardError(
                    f"The environment gave a reward {name!r}, which is a part of the reward already. Give it another name."
                )
            if not math.isfinite(value):
                raise RewardError(
                    f"The environment gave {value} as {name} for prompt {prompt.index}: not a finite number."
                )
        return given

    def _weight(self, name: str) -> float:
        return 1.0 if name == TURNS else self.config.environment.get(name, 1.0)

    def _answer(self, prompt: Prompt, rollout: Rollout) -> Answer:
        ids = rollout.response_ids
        read = self.reasoning.read(rollout.context_ids, ids)
        return Answer(
            read.response,
            prompt.label,
            prompt.kind,
            prompt.token_ids,
            ids,
            prompt.record,
            rollout.trajectories,
            read.graded,
        )
