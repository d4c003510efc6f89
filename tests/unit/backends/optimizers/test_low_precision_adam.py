import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rftmega.backends.optimizers.moments import MomentValues, memory_of
from tests import optional

optional.find()

# isort: split
from torchao.optim.subclass_8bit import OptimState8bit  # noqa: E402

from rftmega.backends.optimizers import low_precision_adam  # noqa: E402
from rftmega.backends.optimizers.low_precision_adam import ADAMS, packed  # noqa: E402

BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-4, 0.1
RATES = (1e-2, 3e-2, 2e-2)
BLOCK = 256
SMALLEST = 4096  # elements of which torchao keeps moments in 8 bits


def in_16_bits(moment: list[float]) -> list[float]:
    return torch.tensor(moment).bfloat16().double().tolist()


def in_8_bits(table: Tensor) -> Callable[[list[float]], list[float]]:
    """Returns what rounds a moment, 256 numbers after 256, to the nearest of a table's."""

    def rounded(moment: list[float]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(moment), BLOCK):
            block = torch.tensor(moment[start : start + BLOCK], dtype=torch.float64)
            scale = block.abs().max()
            away = (block[:, None] / scale - table.double()[None]).abs()
            found += (table.double()[away.argmin(1)] * scale).tolist()
        return found

    return rounded


def plain_steps(
    weights: Tensor, gradients: list[Tensor], kept: tuple[Callable[..., list[float]], ...]
) -> list[float]:
    """Takes steps of AdamW in float64, a number at a time; moments are rounded between steps."""
    values = weights.double().tolist()
    first, second = [0.0] * len(values), [0.0] * len(values)
    for step, (rate, gradient) in enumerate(zip(RATES, gradients, strict=True), 1):
        for at, slope in enumerate(gradient.double().tolist()):
            first[at] += (1 - BETAS[0]) * (slope - first[at])
            second[at] += (1 - BETAS[1]) * (slope * slope - second[at])
            values[at] -= rate * DECAY * values[at]
            root = math.sqrt(second[at] / (1 - BETAS[1] ** step)) + EPSILON
            values[at] -= rate * first[at] / (1 - BETAS[0] ** step) / root
        first, second = kept[0](first), kept[1](second)
    return values


@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
def test_steps_are_adams_with_moments_rounded_between_them(states: str) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SMALLEST // 64, 64))
    before = weight.detach().flatten().clone()
    group = {"params": [weight], "lr": 0.0, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
    adam = ADAMS[states]([group])
    gradients = [torch.randn_like(weight) * 10.0**-step for step in range(3)]
    for rate, gradient in zip(RATES, gradients, strict=True):
        group["lr"] = rate  # as Megatron's schedule does
        weight.grad = gradient
        adam.step()
        assert adam.param_groups[0]["lr"] == rate
    state = adam.state[weight]
    kept = (in_16_bits, in_16_bits)
    if states == "8bit":
        kept = (in_8_bits(state["exp_avg"].qmap), in_8_bits(state["exp_avg_sq"].qmap))
    wanted = plain_steps(before, [each.flatten() for each in gradients], kept)
    exact = plain_steps(before, [each.flatten() for each in gradients], (list, list))
    found = weight.detach().flatten()
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, torch.tensor(exact), atol=1e-4), "nothing was rounded"
    sizes = [part.nbytes for part in memory_of(state["exp_avg"])]
    assert sizes == {"bfloat16": [2 * SMALLEST], "8bit": [SMALLEST, 4 * 16, 4 * 256]}[states]


def moment_of(values: Tensor, *, signed: bool) -> OptimState8bit:
    moment = OptimState8bit.zeros(values.shape, signed, BLOCK, dtype=torch.float32)
    moment.copy_(values)
    return moment


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_is_packed_again_bit_for_bit(
    signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_precision_adam, "AT_ONCE", 150)
    torch.manual_seed(0)
    values = torch.randn(400, BLOCK) * torch.logspace(-15, 3, 400)[:, None]
    if not signed:
        values = values.square()
    values[7] = 0
    values[8, 0] = -100.0 if signed else 100.0
    values[9], values[9, 3] = values[9].abs(), -1.0 if signed else 1.0
    moment = moment_of(values, signed=signed)
    before = moment.dequantize()
    codes, scales = packed(before, moment)
    again = moment.qmap[codes.int()] * scales[:, None]
    assert torch.equal(again, before)
    assert torch.equal(moment_of(before, signed=signed).dequantize(), before) != signed


def test_blocks_of_another_layout_are_rounded_as_torchao_does() -> None:
    torch.manual_seed(1)
    values = torch.randn(16, BLOCK) * torch.logspace(-3, 3, 16)[:, None]
    moment = moment_of(values, signed=True)
    moved = moment.dequantize().flatten().roll(100).view(values.shape)
    codes, scales = packed(moved, moment)
    torch.testing.assert_close(
        moment.qmap[codes.int()] * scales[:, None],
        moment_of(moved, signed=True).dequantize(),
        rtol=0,
        atol=0,
    )


def test_values_of_a_moment_that_is_filled_are_taken_back() -> None:
    class Here:
        def host(self, tensor: Tensor) -> Tensor:
            return tensor

    torch.manual_seed(2)
    source = moment_of(torch.randn(2, BLOCK), signed=True)
    for target in (
        OptimState8bit.zeros((2, BLOCK), True, BLOCK, dtype=torch.float32),
        torch.zeros(2, BLOCK, dtype=torch.bfloat16),
        torch.zeros(2, BLOCK),
    ):
        moments = MomentValues(Here())  # type: ignore[arg-type]
        moments.of(target).copy_(source.dequantize())
        moments.take_back()
        held = target.dequantize() if isinstance(target, OptimState8bit) else target
        assert torch.equal(held.to(target.dtype), source.dequantize().to(target.dtype))
