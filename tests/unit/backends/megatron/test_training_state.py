from types import SimpleNamespace
from typing import Any

import torch

from rftmega.backends.megatron.training_state import adam_steps, set_adam_steps


def test_an_optimizer_that_counts_for_a_whole_group_forgets_its_steps_with_its_states() -> None:
    """As Transformer Engine's FusedAdam does: a count that stayed would correct the first steps'
    bias no more.
    """
    weight = torch.zeros(2)
    fused: Any = SimpleNamespace(state={weight: {}}, param_groups=[{"params": [weight]}])
    manager: Any = SimpleNamespace(optimizer=SimpleNamespace(optimizer=fused))
    set_adam_steps(manager, 7)
    assert (adam_steps(manager), fused.param_groups[0]["step"]) == (7, 7)
    set_adam_steps(manager, 0)
    assert (adam_steps(manager), fused.param_groups[0].get("step")) == (0, None)
