"""What taking requests when an engine runs dry is worth, by the scripted engine's clock."""

import pytest

from benchmarks.rollouts import steps_of
from rftmega.core.types import Prompt

LENGTHS = [40, 4] * 8


@pytest.mark.parametrize(("dealt_once", "steps"), [(True, [160, 16]), (False, [96, 88])])
def test_engines_that_take_when_they_are_dry_end_sooner_and_idle_less(
    dealt_once: bool, steps: list[int]
) -> None:
    """All answers are expected to be of one length; dealt by turns, one engine gets all the long
    ones. The other numbers were found by hand, with the first engine first where both have room in
    one step.
    """
    prompts = [Prompt((5, place)) for place in range(16)]
    assert steps_of(prompts, LENGTHS, [1.0] * 16, 2, 2, dealt_once=dealt_once) == steps
