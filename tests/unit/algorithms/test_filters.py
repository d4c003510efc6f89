import pytest
import torch

from rftmega.algorithms.filters import clip_filter_like_weight_func as weight

AGREE, DIFFER = [0.1, 0.1, 0.1], [0.1, 0.3, 0.9]


@pytest.mark.parametrize(
    ("agreeing", "others", "agreed"),
    [(0, 1.0, None), (1, 4 / 3, 0.5), (2, 2.0, 0.5), (3, 3.0, 0.5), (4, None, 1.0)],
)
def test_groups_that_differ_make_up_for_those_that_agree(
    agreeing: int, others: float | None, agreed: float | None
) -> None:
    found = weight(torch.tensor([AGREE] * agreeing + [DIFFER] * (4 - agreeing)), lamda=0.5)
    assert found.shape == (4, 3)
    expected = [agreed] * agreeing + [others] * (4 - agreeing)
    assert found.tolist() == [[pytest.approx(value)] * 3 for value in expected]


def test_the_cap_and_the_weight_of_agreeing_groups_are_settings() -> None:
    rewards = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]])
    assert weight(rewards, 1.5, 0.0).tolist() == [[0.0, 0.0], [1.5, 1.5], [0.0, 0.0], [0.0, 0.0]]
    assert weight(rewards)[:2].tolist() == [[1.0, 1.0], [3.0, 3.0]]


def test_groups_of_one_all_agree() -> None:
    assert weight(torch.tensor([[1.0], [0.0]]), lamda=0.5).tolist() == [[1.0], [1.0]]
