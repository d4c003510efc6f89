import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftmega.algorithms.shaping import RunningMoments, Shaping, overlong_penalty


def test_long_answers_pay_from_the_buffer_on_and_never_more_than_the_factor() -> None:
    length = torch.tensor([0, 15, 16, 17, 18, 20, 99])
    found = overlong_penalty(length, longest=20, buffer=4, factor=0.5)
    assert found.tolist() == [0.0, 0.0, 0.0, -0.125, -0.25, -0.5, -0.5]


@given(
    st.lists(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6), min_size=1, max_size=5)
)
def test_running_moments_are_those_of_everything_seen_so_far(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch))
    everything = torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    assert moments.mean == pytest.approx(everything.mean().item(), abs=1e-9)
    assert moments.squares == pytest.approx(
        (everything - everything.mean()).square().sum().item(), abs=1e-7
    )
    again = RunningMoments()
    again.state = moments.state
    reward = torch.tensor([0.0, 1.0])
    assert torch.equal(again.normalised(reward), moments.normalised(reward))


def test_normalised_rewards_have_the_spread_of_the_run_and_not_of_the_batch() -> None:
    shape = Shaping(longest=8, normalise=True)
    shape(torch.tensor([0.0, 2.0, 4.0, 6.0]), torch.ones(4))
    found = shape(torch.tensor([3.0, 3.0]), torch.ones(2))
    assert found.tolist() == [0.0, 0.0]
    found = shape(torch.tensor([9.0]), torch.ones(1))
    seen = torch.tensor([0.0, 2.0, 4.0, 6.0, 3.0, 3.0, 9.0])
    assert found.item() == pytest.approx(((9 - seen.mean()) / seen.std()).item(), rel=1e-6)


def test_the_clip_comes_last_and_everything_is_off_by_itself() -> None:
    reward, length = torch.tensor([3.0, -3.0, 0.5]), torch.tensor([8, 1, 8])
    assert torch.equal(Shaping(longest=8)(reward, length), reward)
    assert Shaping(longest=8, buffer=4, factor=1.0, clip=1.0)(reward, length).tolist() == [
        1.0,
        -1.0,
        -0.5,
    ]
