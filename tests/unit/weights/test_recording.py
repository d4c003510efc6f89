"""What a recorder makes of a loader: plain copies with their places, or work that must stay the
loader's.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rftmega.weights.recording import Copy, Geometry, LoadRecorder

Loader = Callable[[Tensor, Tensor], object]


def recorded(loader: Loader) -> LoadRecorder:
    """Of a tensor [8, 6] and a parameter [4, 12]; another tensor is copied to another parameter."""
    recorder = LoadRecorder()
    parameter, other = torch.empty(4, 12, device="meta"), torch.empty(3, device="meta")
    recorder.parameters({"parameter": parameter, "other": other})
    tensor = recorder.tensor("tensor", torch.float32, (8, 6))
    plain = recorder.tensor("plain", torch.float32, (3,))
    with recorder:
        loader(parameter, tensor)
        other.data.copy_(plain)
    return recorder


@pytest.mark.parametrize(
    ("loader", "box", "target"),
    [
        (lambda p, t: p[:, 6:].copy_(t[4:]), ((4, 8), (0, 6)), Geometry((4, 6), (12, 1), 6)),
        (
            lambda p, t: p.data.narrow(1, 3, 3).copy_(t.chunk(2)[1].narrow(1, 2, 3)),
            ((4, 8), (2, 5)),
            Geometry((4, 3), (12, 1), 3),
        ),
        (lambda p, t: p[2, :6].copy_(t.unsqueeze(0).unbind()[0][3]), None, None),
        (
            lambda p, t: p[1:2, :6].copy_(t.unsqueeze(0).unbind()[0][3:4]),
            ((3, 4), (0, 6)),
            Geometry((1, 6), (12, 1), 12),
        ),
        (
            lambda p, t: p.view(8, 6)[:, 2:4].copy_(t[:, :2]),
            ((0, 8), (0, 2)),
            Geometry((8, 2), (6, 1), 2),
        ),
    ],
)
def test_a_copy_is_plain_where_it_takes_a_box(loader: Loader, box: object, target: object) -> None:
    recorder = recorded(loader)
    copies = recorder.plain()
    assert copies["other"] == [Copy("plain", ((0, 3),), Geometry((3,), (1,), 0))]
    assert copies.get("parameter", []) == ([Copy("tensor", box, target)] if box else [])
    assert (recorder.worked_on == set()) is (box is not None)


@pytest.mark.parametrize(
    "loader",
    [
        lambda p, t: (p[:, :6].copy_(t[:4]), p.mul_(2)),  # it computes afterwards
        lambda p, t: (p[:, :6].copy_(t[:4]), p[:, 6:].fill_(0)),  # or fills what is left
        lambda p, t: p[:, :6].copy_(t[:4] * 2),
        lambda p, t: p[:, :6].copy_(t.t().contiguous()[:4, :6]),
        lambda p, t: p[:, :6].copy_(t[:4].double()),
        lambda p, t: p[:, :6].copy_(t[0]),  # one row for four
        lambda p, t: p[:, :6].copy_(t[:1]),  # as a block of one row
        lambda p, t: p[:, :6].add_(t[:4]),
        lambda p, t: torch.add(t[:4], 1, out=p[:, :6]),
    ],
)
def test_whatever_else_a_loader_does_stays_its_own(loader: Loader) -> None:
    recorder = recorded(loader)
    assert recorder.plain().keys() == {"other"}
    assert recorder.asked["tensor"], "what it reads is known all the same"


def test_a_tensor_that_goes_two_ways_goes_them_both_by_the_loader() -> None:
    """The parameter that would get plain copies of it gets none without the one that is computed
    from it.
    """

    def loader(parameter: Tensor, tensor: Tensor) -> None:
        parameter[:, :6].copy_(tensor[:4])
        tensor.sum()

    assert recorded(loader).plain().keys() == {"other"}


def test_views_of_one_tensor_that_are_joined_are_all_read() -> None:
    """As Falcon's loader joins a group's queries, keys and values."""
    recorder = recorded(lambda p, t: p.view(8, 6).copy_(torch.cat([t[5:], t[:2], t[2:5]])))
    assert sorted(recorder.asked["tensor"]) == [
        ((0, 2), (0, 6)),
        ((2, 5), (0, 6)),
        ((5, 8), (0, 6)),
    ]
    assert set(recorder.plain()) == {"other"}


def test_a_computed_tensor_that_is_copied_to_a_tensor_with_memory_is_read_and_not_copied() -> None:
    """As Bloom's loader copies rearranged queries, keys and values."""
    there = torch.full((8, 6), 3.0)
    recorder = recorded(lambda p, t: there.copy_(t.flip(0)))
    assert recorder.asked["tensor"] == [((0, 8), (0, 6))]
    assert set(recorder.plain()) == {"other"}
    assert (there == 3).all()
