"""What a kernel for rows of any lengths is told, by one of ten lines with FlashAttention's meaning of
its arguments.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.backends.fsdp import packed_attention
from rftmega.backends.fsdp.decoder_inputs import feed
from rftmega.backends.fsdp.packed_attention import Edges, takes_rows
from tests.tiny_decoders import save_decoder
from tests.unit.backends.fsdp.test_families import TEMPERATURE, loaded, of_transformers, rows


def flash_rows(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, of_keys: Tensor,
    longest: int, longest_keys: int,
    *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`window_size`: tokens before and behind its own, -1 for all; the last query of a row is at the
    last key (flash_attn's README).
    """
    before, behind = window_size
    assert (starts.dtype, of_keys.dtype, behind) == (torch.int32, torch.int32, 0)
    assert query.is_contiguous()
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert longest == int(starts.diff().max())
    assert longest_keys == int(of_keys.diff().max())
    rows = []
    for start, stop, begin, end in zip(
        starts.tolist(), starts.tolist()[1:], of_keys.tolist(), of_keys.tolist()[1:], strict=False
    ):
        for token in range(start, stop):
            last = end - (stop - token)
            first = begin if before < 0 else max(begin, last - before)
            heads = []
            for head in range(query.shape[1]):
                shared = head * key.shape[1] // query.shape[1]
                scores = key[first : last + 1, shared] @ query[token, head]
                weights = (scores * (scale or query.shape[-1] ** -0.5)).softmax(0)
                heads.append(weights @ value[first : last + 1, shared])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "mistral with a window", "gemma3", "gpt-oss"])
def test_rows_in_one_kernel_give_transformers_own_log_probs(
    family: str, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of torch 2.11 knows no heads that share keys and values."""
    asked, offsets = [], []

    def noted(*given: Any, **named: Any) -> Tensor:
        asked.append(named["window_size"])
        offsets.append(given[3])
        assert shares or "enable_gqa" not in named
        return flash_rows(*given, **named)

    folder = save_decoder(tmp_path, family)
    built, _, _ = loaded(folder)
    monkeypatch.setattr(packed_attention, "takes_rows", lambda query, value: True)
    monkeypatch.setattr(packed_attention, "varlen_attn", noted)
    monkeypatch.setattr(packed_attention, "SHARES", shares)
    tokens, lengths = rows()
    fed = feed(tokens, lengths, packed=True, where=torch.device("cpu"))
    with torch.no_grad():
        logp, _ = built.network(fed.arguments, fed.places, fed.targets, TEMPERATURE)
    wanted, _ = of_transformers(folder)
    torch.testing.assert_close(logp, torch.cat(wanted), rtol=0, atol=1e-5)
    sinks = family == "gpt-oss"  # which no such kernel takes
    assert len(asked) == (0 if sinks else 3)
    assert all(each is offsets[0] for each in offsets), "every layer sends the edges to the device"


def test_what_attention_needs_of_the_edges_is_made_once_for_all_layers() -> None:
    edges = Edges([0, 2, 5, 7])
    lengths, back = edges.places(torch.device("cpu"))
    assert [(place.tolist(), tuple(shape)) for place, shape in lengths] == [
        ([0, 1, 5, 6], (2, 2)),
        ([2, 3, 4], (1, 3)),
    ]
    assert torch.cat([place for place, _ in lengths])[back].tolist() == list(range(7))
    assert edges.places(torch.device("cpu"))[1] is back
    assert (edges.longest, edges.offsets(torch.device("cpu")).tolist()) == (3, [0, 2, 5, 7])


def test_the_kernel_takes_half_precision_on_cuda_alone() -> None:
    class OnCuda:
        is_cuda = True

        def __init__(self, dtype: torch.dtype, size: int) -> None:
            self.dtype, self.shape = dtype, (1, 4, 10, size)

    def takes(dtype: torch.dtype, size: int, values: int) -> bool:
        query: Any = OnCuda(dtype, size)
        value: Any = OnCuda(dtype, values)
        return takes_rows(query, value)

    assert takes(torch.bfloat16, 128, 128)
    assert not takes(torch.float32, 128, 128)
    assert not takes(torch.bfloat16, 192, 128)  # latent attention
    assert not takes(torch.bfloat16, 288, 288)
    assert not takes(torch.bfloat16, 20, 20)
    half = torch.zeros(1, 4, 10, 128, dtype=torch.bfloat16)
    assert not takes_rows(half, half)
