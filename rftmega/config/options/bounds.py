"""Numeric bounds as annotations of fields; `config.validation` checks the bounds, and the JSON
schema shows them.
"""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

AtMostOne = Annotated[int, Ge(0), Le(1)]
Count = Annotated[int, Ge(1)]
AtLeastTwo = Annotated[int, Ge(2)]
NotNegativeInt = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
AtLeastOne = Annotated[float, Ge(1)]
PositiveBelowOne = Annotated[float, Gt(0), Lt(1)]
