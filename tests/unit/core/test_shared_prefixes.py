"""Rows that begin alike, against the rows themselves."""

import random
from typing import Any

import pytest
import torch

from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.core.ragged import Ragged
from rftmega.core.shared_prefixes import FEWEST, SHORTEST, SortedRows


def rows_of(seed: int) -> list[list[int]]:
    """Rows of four prompts behind one system prompt, of which some begin as others go on, and some
    are equal.
    """
    rng = random.Random(seed)
    system, rows = [1] * 20, []
    for _ in range(4):
        prompt = system + [rng.randrange(9) for _ in range(rng.randrange(30))]
        for _ in range(rng.randrange(1, 6)):
            row = prompt + [rng.randrange(3) for _ in range(rng.randrange(30))]
            more = (row[: rng.randrange(1, len(row))], [*row, *[5] * 20], list(row))
            rows += [row, *(other for other in more if rng.random() < 0.3)]
    rng.shuffle(rows)
    return rows


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()) + 1, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return tokens, lengths


@pytest.mark.parametrize("seed", range(30))
def test_each_row_is_found_again_on_its_path_through_the_tree(seed: int) -> None:
    rows = rows_of(seed)
    tokens, lengths = padded(rows)
    columns = tokens.shape[1]
    found = SortedRows.of(tokens, lengths)
    packed = found.packed(columns)
    ids, places = tokens.flatten()[packed.slots], packed.places.view(len(rows), columns)
    assert len(ids) == found.computed < int(lengths.sum())
    holder = {
        slot: number
        for number, segment in enumerate(packed.segments)
        for slot in range(segment.start, segment.stop)
    }
    assert sorted(holder) == list(range(len(ids)))
    for row, own in zip(rows, places, strict=True):
        assert ids[own[: len(row)]].tolist() == row
        assert (own[len(row) :] == -1).all()
        path, number = [], holder[int(own[len(row) - 1])]
        while number >= 0:
            segment = packed.segments[number]
            path = [*range(segment.start, segment.stop), *path]
            number, below = segment.parent, segment
            if number >= 0:
                above = packed.segments[number]
                assert above.stop <= below.start and below.end <= above.end
                assert below.before == above.before + above.stop - above.start
        assert path[: len(row)] == own[: len(row)].tolist()


@pytest.mark.parametrize("seed", range(10))
def test_some_of_the_rows_share_as_if_they_were_sorted_alone(seed: int) -> None:
    rows = rows_of(seed)
    tokens, lengths = padded(rows)
    chosen = random.Random(seed).sample(range(len(rows)), len(rows) // 2 + 1)
    whole = SortedRows.of(Ragged.of_padded(tokens, lengths), lengths)
    found, wanted = whole.select(chosen), SortedRows.of(tokens[chosen], lengths[chosen])
    for row, other in zip(found.order, wanted.order, strict=True):
        assert rows[chosen[row]] == rows[chosen[other]]
    assert found.common.tolist() == wanted.common.tolist()
    assert found.computed == wanted.computed
    assert whole.select([]).computed == 0


@pytest.mark.parametrize("seed", range(10))
def test_tokens_with_one_prediction_follow_the_same_beginning_and_precede_the_same_token(
    seed: int,
) -> None:
    rows = rows_of(seed)
    tokens, lengths = padded(rows)
    tokens = tokens[:, :-1]
    columns = tokens.shape[1] - 1  # the longest rows fill them
    packed = SortedRows.of(tokens, lengths - 1).packed(columns)
    found = packed.predictions(columns)
    targets = tokens[:, 1:].flatten()
    present = (packed.places >= 0).nonzero()[:, 0]
    assert found.present.tolist() == present.tolist()
    assert torch.equal(packed.places[present], found.places[found.copies])
    assert torch.equal(targets[present], targets[found.slots][found.copies])
    assert len(found.places) <= len(packed.slots) + len(rows)


@pytest.mark.parametrize(
    ("rows", "common", "saved"),
    [
        (2, SHORTEST - 1, 0),
        (9, SHORTEST - 1, 0),
        (9, SHORTEST, 8 * SHORTEST),
        (2, FEWEST, FEWEST),
        (2, FEWEST - 1, 0),
    ],
)
def test_a_beginning_is_shared_if_it_is_long_enough_and_saves_enough(
    rows: int, common: int, saved: int
) -> None:
    tokens = torch.zeros(rows, common + 1, dtype=torch.int64)
    tokens[:, common] = torch.arange(rows)
    found = SortedRows.of(tokens, torch.full((rows,), common + 1))
    assert int(found.lengths.sum()) - found.computed == saved


def test_rows_that_extend_each_other_are_one_segment() -> None:
    lengths = torch.tensor([400, 100, 320, 200, 500])
    chain = torch.ones(5, 500, dtype=torch.int64)
    (only,) = SortedRows.of(chain, lengths).packed(500).segments
    assert only == (0, 500, 500, 0, -1)
    chain[4, 250:] = 2  # the longest goes on differently after the row of 200
    found = SortedRows.of(chain, lengths).packed(500).segments
    assert found == ((0, 250, 650, 0, -1), (250, 400, 400, 250, 0), (400, 650, 650, 250, 0))


def test_rows_with_other_images_share_nothing() -> None:
    def image(digest: str) -> PlacedImage:
        return PlacedImage(b"", digest, (1, 2, 2), 0, 1)

    tokens, lengths = torch.ones(4, 80, dtype=torch.int64), torch.full((4,), 80)
    seen: Any = RowImages(((image("a"),), (image("b"),), (image("a"),), ()))
    assert SortedRows.of(tokens, lengths, seen).computed == 3 * 80
    assert SortedRows.of(tokens, lengths).computed == 80
