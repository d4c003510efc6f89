"""A tensor that is asked only for what is copied from it."""

import pytest
import torch
from torch import Tensor

from rftmega.weights.lazy_tensors import Box, LazyTensor

WHOLE = torch.arange(48.0).reshape(8, 6)


def lazy(asked: list[Box]) -> Tensor:
    def fetch(box: Box, out: Tensor) -> None:
        asked.append(box)
        out.copy_(WHOLE[tuple(slice(start, stop) for start, stop in box)])

    return LazyTensor.of((8, 6), torch.float32, fetch, torch.device("cpu"))


@pytest.mark.parametrize(
    ("view", "box"),
    [
        (lambda t: t, ((0, 8), (0, 6))),
        (lambda t: t.narrow(0, 2, 3), ((2, 5), (0, 6))),
        (lambda t: t[2:5], ((2, 5), (0, 6))),
        (lambda t: t.narrow(1, 4, 2), ((0, 8), (4, 6))),
        (lambda t: t[:, 1:4][3:], ((3, 8), (1, 4))),
        (lambda t: t.chunk(4)[3], ((6, 8), (0, 6))),
        (lambda t: t.split([2, 4], dim=1)[1].data, ((0, 8), (2, 6))),
        (lambda t: t.view(8, 6)[7:], ((7, 8), (0, 6))),
        (lambda t: t.narrow(0, 3, 2).detach(), ((3, 5), (0, 6))),
    ],
)
def test_a_view_asks_for_its_own_elements_and_no_others(view, box: Box) -> None:  # type: ignore[no-untyped-def]
    asked: list[Box] = []
    wanted = view(WHOLE)
    assert torch.equal(torch.full(wanted.shape, torch.nan).copy_(view(lazy(asked))), wanted)
    assert asked == [box]


@pytest.mark.parametrize(
    "made",
    [
        # no box of the whole: everything is fetched, and what comes is still right
        lambda t: t.t()[1:3],
        lambda t: t.reshape(4, 12)[1:],
        lambda t: t.reshape(1, 48)[:, 7:20],
        lambda t: t[3],
        lambda t: t[2:4].double(),
        lambda t: t[2:4] + 1,
        lambda t: torch.cat([t[:1], t[5:6]]),
        lambda t: t.permute(1, 0).contiguous(),
        lambda t: t[::2],
    ],
)
def test_whatever_else_a_loader_does_it_gets_the_right_elements(made) -> None:  # type: ignore[no-untyped-def]
    wanted = made(WHOLE)
    assert torch.equal(
        torch.full(wanted.shape, torch.nan, dtype=wanted.dtype).copy_(made(lazy([]))), wanted
    )


def test_numbers_and_lists_are_read_for_real() -> None:
    assert lazy([])[2:3, 1:2].item() == 13
    assert lazy([])[1].tolist() == WHOLE[1].tolist()
    assert lazy([]).shape == (8, 6)


def test_parts_of_a_parameter_may_be_set_as_well_as_copied_to() -> None:
    parameter = torch.zeros(4, 6)
    parameter[1:3] = lazy([])[5:7]
    assert torch.equal(parameter[1:3], WHOLE[5:7])


def test_an_empty_view_asks_for_nothing() -> None:
    asked: list[Box] = []
    torch.empty(0, 6).copy_(lazy(asked)[8:])
    assert asked == []


def test_a_copy_that_is_only_counted_fetches_nothing() -> None:
    asked: list[Box] = []
    torch.empty(2, 6, device="meta").copy_(lazy(asked)[:2])
    assert asked == []
