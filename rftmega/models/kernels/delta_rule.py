"""The gated delta rule (arXiv:2412.06464), a linear attention, and the causal convolution before it,
over packed rows in plain torch.

Each value head has a state S [key size, value size], which is zero before a row's first token. With
the token's decay a, rate b, key k and value v it becomes a S + b k (v - a S^T k)^T, and the token's
output is S^T q. Tokens are taken in chunks: all products within chunks are computed at once, and
only the states between the chunks of a row one after the other (section 3.3 of the paper).
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens of a chunk, at most
EPSILON = 1e-6  # of the lengths of queries and keys, as in transformers


def order_of_rows(edges: list[int], processes: int) -> Tensor:
    """Returns the index of each packed token in the concatenation of all context-parallel ranks'
    tokens. Each of the `processes` ranks holds two zig-zag chunks of every row (see `attention`).

    `edges`: the indices of packed tokens at which rows begin and end.
    """
    lengths = torch.tensor(edges).diff()
    start, length = (x.repeat_interleave(lengths) for x in (torch.tensor(edges[:-1]), lengths))
    place = torch.arange(edges[-1]) - start
    size = length // (2 * processes)
    chunk = place // size
    behind = chunk >= processes
    holder = torch.where(behind, 2 * processes - 1 - chunk, chunk)
    return holder * (edges[-1] // processes) + start // processes + behind * size + place % size


class Chunks(NamedTuple):
    """Chunks divides packed rows into chunks of one size. First come the first chunks of all rows,
    then the second chunks of the rows that have one, and so on; longer rows precede shorter ones.
    """

    # [chunks, size] indices of packed tokens; 0 where a row has ended: nothing that is used depends
    # on what follows a row
    tokens: Tensor
    places: Tensor  # [tokens] the position of each token in the flattened `tokens`
    steps: tuple[int, ...]  # number of first chunks, of second chunks, ...


def divided(edges: list[int]) -> Chunks:
    """Returns the chunks of rows whose packed tokens begin and end at `edges`."""
    rows = [(stop - start, start) for start, stop in itertools.pairwise(edges) if stop > start]
    rows.sort(reverse=True)
    longest = rows[0][0] if rows else 1
    size = min(CHUNK, longest)
    starts: list[int] = []
    ends: list[int] = []
    steps: list[int] = []
    for first in range(0, longest, size):
        reaching = [row for row in rows if row[0] > first]
        starts += [start + first for _, start in reaching]
        ends += [start + length for length, start in reaching]
        steps.append(len(reaching))
    index = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(size)
    inside = index < torch.tensor(ends, dtype=torch.int64)[:, None]
    places = torch.zeros(edges[-1], dtype=torch.int64)
    places[index[inside]] = inside.flatten().nonzero()[:, 0]
    return Chunks(index.where(inside, 0), places, tuple(steps))


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, chunks: Chunks
) -> Tensor:
    """Returns the outputs [tokens, value heads, value size] of packed rows, in the dtype of `value`.

    `query`, `key` [tokens, key heads, key size] are scaled to length 1, queries by 1 / sqrt(key
    size) besides; each key head serves several consecutive value heads of `value` [tokens, value
    heads, value size]. `decay` [tokens, value heads]: logarithm of a, at most 0; `rate` [tokens,
    value heads]: b. Computes in float32.
    """
    heads, width = key.shape[1:]
    several = value.shape[1] // heads
    # [chunks, key heads, 1, size, key size]
    query, key = (_in_chunks(_normalised(x.float()), chunks)[:, :, None] for x in (query, key))
    query = query * width**-0.5
    value_heads = (x.float().unflatten(1, (heads, several)) for x in (value, decay, rate))
    # [chunks, key heads, several, size, ...]
    values, decay, rate = (
        x[chunks.tokens].permute(0, 2, 3, 1, *range(4, x.dim() + 1)) for x in value_heads
    )
    rate = rate[..., None]
    summed = decay.cumsum(-1)  # log of the decay since the chunk's begin
    between = summed[..., :, None] - summed[..., None, :]  # log of the decay between two tokens
    size = chunks.tokens.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()
    grown = summed.exp()[..., None]
    keys = key.transpose(-1, -2)
    system = rate * between * (key @ keys)  # its diagonal is taken as 1
    mixed = between * (query @ keys)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([rate * values, rate * grown * key], -1), upper=False, unitriangular=True
    )
    new, read = solved.split([values.shape[-1], width], -1)
    last = summed[..., -1:]
    passed = query * grown
    kept = (key * (last - summed).exp()[..., None]).transpose(-1, -2)
    states = _over_chunks(new, read, kept, last.exp()[..., None], chunks.steps)
    written = new - read @ states
    found = passed @ states + mixed @ written
    found = found.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
    return found[chunks.places].type_as(value)


def _over_chunks(
    new: Tensor, read: Tensor, kept: Tensor, decay: Tensor, steps: tuple[int, ...]
) -> Tensor:
    """Returns the state before each chunk, [chunks, key heads, several, key size, value size]."""
    states = []
    state = new.new_zeros(steps[0], *new.shape[1:3], read.shape[-1], new.shape[-1])
    first = 0
    for number in steps:
        here = slice(first, first + number)
        state = state[:number]
        states.append(state)
        written = new[here] - read[here] @ state
        state = decay[here] * state + kept[here] @ written
        first += number
    return torch.cat(states)


def _in_chunks(given: Tensor, chunks: Chunks) -> Tensor:
    """Returns [tokens, heads, size] as [chunks, heads, tokens of a chunk, size]."""
    return given[chunks.tokens].transpose(1, 2)


def _normalised(given: Tensor) -> Tensor:
    return given * torch.rsqrt(given.square().sum(-1, keepdim=True) + EPSILON)


def causal_convolution(given: Tensor, weight: Tensor, places: Tensor, rows: int) -> Tensor:
    """Convolves each channel of packed rows `given` [tokens, channels] with its own `weight`
    [channels, width]: a token's output depends on itself and the width - 1 tokens before it in its
    row; before a row's begin there are zeros.

    `places` [tokens]: see `behind_gaps`, with gaps of width - 1; `rows`: number of rows.
    """
    before = weight.shape[1] - 1
    apart = given.new_zeros(len(given) + rows * before, given.shape[1])
    apart = apart.index_copy(0, places, given)
    length = len(apart) - before
    found = apart[:length] * weight[:, 0]
    for tap in range(1, before + 1):
        found = found + apart[tap : tap + length] * weight[:, tap]
    return found[places - before]


def behind_gaps(edges: list[int], gap: int) -> Tensor:
    """Returns the position [tokens] of each packed token if `gap` positions precede each row."""
    lengths = torch.tensor(edges).diff()
    row = torch.arange(1, len(edges)).repeat_interleave(lengths)
    return torch.arange(len(row)) + gap * row
