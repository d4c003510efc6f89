"""Rows without padding, against lists."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from rftmega.algorithms.gae import discounted_returns
from rftmega.core import ragged
from rftmega.core.ragged import Ragged, by_rows

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=6), min_size=1, max_size=8)


def of(rows: list[list[int]]) -> Ragged:
    """Rows in a larger memory, with other values before, between and behind them."""
    values, starts = [77], []
    for row in rows:
        starts.append(len(values))
        values += [*row, 77]
    lengths = torch.tensor([len(row) for row in rows])
    return Ragged(torch.tensor(values), torch.tensor(starts), lengths)


def lists(rows: Ragged) -> list[list[int]]:
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("short", [0, ragged.SHORT])
@drawn(rows=ROWS, data=st.data())
def test_rows_are_what_a_list_of_them_is(
    short: int, rows: list[list[int]], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "SHORT", short)
        check_rows(rows, data)


def check_rows(rows: list[list[int]], data: st.DataObject) -> None:
    found = of(rows)
    assert lists(found) == rows
    assert found.flat.tolist() == [x for row in rows for x in row]
    assert lists(found.with_values(found.flat * 2)) == [[2 * x for x in row] for row in rows]
    width = max(map(len, rows))
    assert found.padded(width=width + 1, fill=5).tolist() == [
        row + [5] * (width + 1 - len(row)) for row in rows
    ]
    assert lists(Ragged.of_padded(found.padded(fill=5), found.lengths)) == rows
    assert found.sums().tolist() == [sum(row) for row in rows]
    assert found.spread(torch.arange(len(rows))).tolist() == [
        number for number, row in enumerate(rows) for _ in row
    ]
    whole = Ragged.packed(found.flat.int(), found.lengths)
    assert whole.sums().tolist() == [sum(row) for row in rows]
    found.assign(found.padded(width=width + 2) + 1)
    assert lists(found) == [[x + 1 for x in row] for row in rows]
    assert found.values[0] == 77, "what lies between the rows stays as it is"
    found.assign(found.padded() - 1)
    assert lists(found.extended(3)) == [[*row, 3] for row in rows]
    assert lists(found.shifted(1)) == [row[1:] for row in rows]
    assert lists(Ragged.join([found, found.shifted(1)])) == [*rows, *(row[1:] for row in rows)]
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9))
    chosen = found.select(torch.tensor(order, dtype=torch.int64))
    assert lists(chosen) == [rows[row] for row in order]
    assert chosen.flat.tolist() == [x for row in order for x in rows[row]]
    assert chosen.values is found.values, "a choice copies nothing"


def test_rows_that_lie_behind_each_other_are_a_view() -> None:
    rows = Ragged.packed(torch.arange(9), torch.tensor([2, 3, 4]))
    rows.select(torch.tensor([1, 2])).flat[0] = 50
    assert rows[1].tolist() == [50, 3, 4]
    rows.assign(torch.tensor([[7, 7, 9, 9], [8, 8, 8, 9], [6, 6, 6, 6]]))
    assert rows.flat.tolist() == [7, 7, 8, 8, 8, 6, 6, 6, 6]
    assert rows.at(torch.tensor([1, 0, 3])).tolist() == [7, 8, 6]


@pytest.mark.parametrize("most", [1, 10, 16, 1000])
def test_chunks_of_rows_give_what_all_of_them_give(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """To the last bit, with no more padded at a time than is allowed, one row at least."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 8, 0, 3, 7, 7, 2])
    reward = Ragged.packed(torch.randn(33), lengths)
    mask = Ragged.packed(torch.rand(33) < 0.7, lengths)
    wanted = discounted_returns(reward.padded(), mask.padded(), 0.9)
    monkeypatch.setattr(ragged, "CHUNK", most)
    shapes = []

    def function(
        reward: torch.Tensor,
        mask: torch.Tensor,
        gamma: float,
        more: torch.Tensor,
        row: torch.Tensor,
    ) -> torch.Tensor:
        shapes.append(reward.shape)
        assert row.shape == (len(reward),)
        return discounted_returns(reward, mask, gamma) + more

    found = by_rows(function, reward, mask, 0.9, torch.tensor(0.0), torch.arange(8))
    assert torch.equal(found.padded(), wanted)
    assert all(rows == 1 or rows * width <= most for rows, width in shapes)
    assert sum(rows for rows, _ in shapes) == len(lengths)
    assert len(shapes) == (1 if most == 1000 else len(shapes)) and (most > 10 or len(shapes) > 4)
