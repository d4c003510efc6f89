from pathlib import Path

import torch

from rftmega.config import ParallelConfig
from rftmega.model_providers.builder import transformer_config
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from tests.tiny_models import save_tiny


def test_experts_are_not_balanced_by_another_loss(tmp_path: Path) -> None:
    """A balancing loss would be scaled by counts of tokens that are not the loss's; there is none."""
    model = describe(read_hf_config(save_tiny(tmp_path, "qwen3-moe")))
    config = transformer_config(model, ParallelConfig(), torch.float32, dropout=0.0)
    assert (
        config.moe_router_load_balancing_type,
        config.moe_aux_loss_coeff,
        config.moe_z_loss_coeff,
    ) == ("none", 0.0, None)
    assert config.calculate_per_token_loss
