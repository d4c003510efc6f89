"""The moving average of the weights (semantics 31)."""

import pytest
import torch

from rftmega.runtime.device.held_weights import AveragedWeights
from rftmega.runtime.device.residency import PARAMETERS, Residency


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_its_closed_form_in_float32(dtype: torch.dtype) -> None:
    """beta = .992: after n steps .992^n of the start and .008 x .992^(n - 1 - i) of step i's
    weights.
    """
    parameter = torch.nn.Parameter(torch.full((3,), 2.0, dtype=dtype))
    syncs: list[int] = []
    residency = Residency(lambda: {PARAMETERS: [parameter]}, finish=lambda: syncs.append(1))
    average = AveragedWeights(residency, lambda: [parameter.detach()], 0.992)
    for step in range(50):
        residency.settle()
        parameter.data.fill_(float(step))
        residency.changed()
        average.update()
    wanted = 2.0 * 0.992**50 + sum(0.008 * 0.992 ** (49 - step) * step for step in range(50))
    (held,) = average.held
    assert held.dtype == torch.float32
    torch.testing.assert_close(held, torch.full((3,), wanted), rtol=1e-5, atol=0)
    assert len(syncs) == 50
    with average.swapped_in():
        torch.testing.assert_close(parameter.data.float(), held.to(dtype).float())
    assert parameter.data.tolist() == [49.0] * 3
