"""Where generators stand goes through JSON and back."""

import json
import random

import numpy
import torch

from rftmega.runtime.parallel import seeds


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), *numpy.random.randn(3), *torch.randn(3).tolist()]


def test_draws_go_on_from_a_state_that_went_through_json() -> None:
    seeds.set_seed(3)
    draws()  # leaves half a pair of normal numbers in python and numpy
    state = json.dumps(seeds.random_state())
    expected = draws()
    draws()
    seeds.set_random_state(json.loads(state))
    assert draws() == expected
