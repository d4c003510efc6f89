"""What vLLM's reload asks of parameter loaders."""

from functools import partial

import pytest
import torch


def test_loaders_that_are_partial_functions_get_the_name_of_their_function() -> None:
    reload = pytest.importorskip("rftmega.weights.receivers.reload")

    def of_a_shard(parameter: torch.Tensor, loaded: torch.Tensor, rank: int) -> None:
        parameter.data.copy_(loaded[rank])

    model = torch.nn.Linear(2, 2)
    model.weight.weight_loader = partial(of_a_shard, rank=1)
    reload.name_loaders(model)
    assert model.weight.weight_loader.__name__ == "of_a_shard"
    model.bias.weight_loader = of_a_shard
    reload.name_loaders(model)  # again, and beside one that has its own name
    assert model.bias.weight_loader is of_a_shard
