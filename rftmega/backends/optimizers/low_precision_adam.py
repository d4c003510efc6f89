"""AdamW with 16-bit or 8-bit moments: torchao's optimizer, adapted to Megatron's optimizer
wrappers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from rftmega.runtime import device

AT_ONCE = 1 << 16  # blocks that are packed together: each number takes 20 bytes meanwhile
LEAST_SCALE = 1e-12  # torchao's scale of a block of zeros


class LowPrecisionAdam(AdamW8bit):
    """LowPrecisionAdam is AdamW with 8-bit moments, which have one scale per block of 256 elements."""

    def __init__(self, groups: list[dict[str, Any]]):
        """Uses `groups`, the parameter groups of another optimizer, without copying them."""
        # torch refuses views, which Megatron's distributed optimizer steps
        super().__init__([torch.empty(0)])
        self.param_groups = groups
        for group in groups:
            group.setdefault("amsgrad", False)
        self._rates = [
            torch.tensor(float(group["lr"])) for group in groups
        ]  # torchao expects tensors

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step with the learning rates that the schedule wrote into the parameter groups."""
        rates = [group["lr"] for group in self.param_groups]
        for tensor, rate in zip(self._rates, rates, strict=True):
            tensor.fill_(rate)
        self._set_rates(self._rates)
        try:
            # torch.compile takes half a minute per shape on a CPU
            stance = "default" if device.current().type == "cuda" else "force_eager"
            with torch.compiler.set_stance(stance):
                return super().step(closure)
        finally:
            self._set_rates(rates)

    def _set_rates(self, rates: list[Any]) -> None:
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def moment(self, main: Tensor, *, signed: bool) -> Tensor:
        """Returns a moment of zeros for a main parameter, in this optimizer's storage format.
        `signed`: values may be negative, as for Adam's first moment.
        """
        found: Tensor = self._new_buffer(main, signed)
        return found


class SixteenBitAdam(LowPrecisionAdam):
    """SixteenBitAdam is AdamW with bfloat16 moments."""

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        return torch.zeros_like(p, dtype=torch.bfloat16)  # for sizes of any layout


ADAMS = {"bfloat16": SixteenBitAdam, "8bit": LowPrecisionAdam}


@torch.no_grad()
def packed(values: Tensor, like: OptimState8bit) -> tuple[Tensor, Tensor]:
    """Returns the 8-bit codes and scales of a float32 moment; `like` is an 8-bit moment of the same
    format.
    A block that was dequantised is quantised to the same values again, bit for bit: the scale is
    chosen among those that could have produced the block's largest value. torchao would use the
    largest value as the scale; if that value came from the lowest code, the block would be rounded
    down each time.
    """
    table = like.qmap.to(values.device)
    parts = values.reshape(-1, like.block_size).split(AT_ONCE)
    codes, scales = zip(*(_packed_blocks(blocks, table) for blocks in parts), strict=True)
    return torch.cat(codes).view(values.shape), torch.cat(scales)


def _packed_blocks(blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    middles = (table[1:] + table[:-1]) / 2
    largest = blocks.abs().amax(1).clamp(min=LEAST_SCALE)
    codes = torch.zeros_like(blocks, dtype=torch.uint8)
    scales, found = largest.clone(), torch.zeros_like(largest, dtype=torch.bool)
    for scale in (*_candidates(largest, float(table[0].abs())), largest):
        if found.all():
            break
        tried = torch.bucketize(blocks / scale[:, None], middles)
        exact = ((table[tried] * scale[:, None]) == blocks).all(1)
        taken = (exact | (scale is largest)) & ~found
        codes[taken], scales[taken] = tried[taken].to(torch.uint8), scale[taken]
        found |= exact
    return codes, scales


def _candidates(largest: Tensor, lowest: float) -> list[Tensor]:
    """Returns the scales that blocks with the largest values `largest` can have had; `lowest` is
    the magnitude of the lowest code.
    """
    found = [torch.full_like(largest, LEAST_SCALE)]
    for code in (1.0, lowest):
        near = largest / code if code else largest
        up = torch.nextafter(near, torch.full_like(near, torch.inf))
        down = torch.nextafter(near, torch.zeros_like(near))
        found += [near, up, down]
    return found
