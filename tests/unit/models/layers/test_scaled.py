"""Constant factors of what a module returns."""

import torch

from rftmega.models.layers.scaled import scale_output


def test_a_factor_is_rounded_as_the_tensor_is() -> None:
    torch.manual_seed(2)
    module, plain = torch.nn.Identity(), torch.randn(64).bfloat16()
    scale_output(module, 25.298, rounded=True)
    assert torch.equal(module(plain), plain * torch.tensor(25.298).bfloat16())
    assert not torch.equal(module(plain), plain * 25.298)


def test_a_factor_multiplies_the_gradient() -> None:
    module, given = torch.nn.Identity(), torch.ones(3, requires_grad=True)
    scale_output(module, 0.5)
    module(given).sum().backward()
    assert torch.equal(given.grad, torch.full((3,), 0.5))
