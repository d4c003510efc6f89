"""A constructor with few arguments: what belongs together is one object."""

import inspect

import pytest

from rftmega.trainer import PPOTrainer
from rftmega.trainer.experience import ExperienceMaker


@pytest.mark.parametrize(("built", "most"), [(ExperienceMaker, 6), (PPOTrainer, 9)])
def test_a_constructor_takes_no_more_arguments_than_one_can_hold_in_mind(
    built: type, most: int
) -> None:
    assert len(inspect.signature(built).parameters) <= most
