"""ScoringModel: a reward or cost model of a run, as the config describes it."""

from typing import NamedTuple


class ScoringModel(NamedTuple):
    """ScoringModel is a value model whose score of a whole completion is part of its reward."""

    component: str  # name of the score among the reward components
    weight: float  # of the score in the reward; negative for a cost
    path: str  # Hugging Face folder
    option: str  # name of the option that gives the path
