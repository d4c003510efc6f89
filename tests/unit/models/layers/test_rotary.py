"""All packed rows are rotated at once, as a loop over tokens in float64 rotates them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rftmega.runtime.device.before_megatron  # noqa: F401

# isort: split
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from rftmega.backends.megatron.forward import pack
from rftmega.models.layers.rotary import PackedRotary

HEADS, WIDTH, BASE = 3, 8, 10_000.0
LENGTHS = [5, 1, 9, 4, 4]


def rotated(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """[N, HEADS, WIDTH]: each pair (i, i + WIDTH / 2) turned by position / BASE^(2 i / WIDTH)."""
    found = x.double().clone()
    half = WIDTH // 2
    for token, position in enumerate(positions):
        for i in range(half):
            angle = position / BASE ** (2 * i / WIDTH)
            cos, sin = math.cos(angle), math.sin(angle)
            a, b = x[token, :, i].double(), x[token, :, i + half].double()
            found[token, :, i], found[token, :, i + half] = a * cos - b * sin, b * cos + a * sin
    return found


class Group(SimpleNamespace):
    """As much of a process group as a rotation asks."""

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.here


def table() -> RotaryEmbedding:
    return RotaryEmbedding(
        WIDTH,
        1.0,
        rotary_base=int(BASE),
        use_cpu_initialization=True,
        cp_group=Group(ranks=1, here=0),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_token_is_turned_by_its_own_position(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    cuts: list[Any] = []
    real = rope_utils._get_thd_freqs_on_this_cp_rank
    monkeypatch.setattr(
        rope_utils,
        "_get_thd_freqs_on_this_cp_rank",
        lambda *given: cuts.append(given) or real(*given),
    )
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    rotary = PackedRotary(table())
    for rank in range(ranks):
        packing = pack(mask, context_rank=rank, context=ranks, where=torch.device("cpu"))
        positions = packing.positions[0]
        x = torch.randn(len(positions), HEADS, WIDTH)
        rotary.next(packing.sequence, positions, rank=rank, ranks=ranks)
        angles = rotary(packing.sequence.max_seqlen_q, packed_seq=True)
        group: Any = Group(ranks=ranks, here=rank)
        found = rope_utils.apply_rotary_pos_emb(
            x, angles, config, cu_seqlens=packing.sequence.cu_seqlens_q_padded, cp_group=group
        )
        torch.testing.assert_close(
            found.double(), rotated(x, positions.tolist()), atol=1e-5, rtol=1e-5
        )
    assert len(cuts) == ranks, "one cut a call, not one a row"


def test_rows_that_are_not_packed_get_the_table_as_it_is() -> None:
    assert torch.equal(PackedRotary(table())(7), table()(7))
