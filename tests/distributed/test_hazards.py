"""What Megatron-Core would do wrong without a word is refused."""

from pathlib import Path
from typing import Any

import pytest

from rftmega.backends.megatron import MegatronActor, MegatronModelManager
from rftmega.backends.megatron.manager import refuse_hazards
from rftmega.config import ParallelConfig
from rftmega.core.errors import ConfigError
from rftmega.model_providers.builder import transformer_config
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.runtime.parallel.topology import Topology
from tests.layouts import build_actor, config_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig


@pytest.mark.parametrize(
    ("parallel", "change", "complaint"),
    [
        (
            P(pipeline=2, virtual_pipeline=2),
            {"batch_p2p_comm": True, "overlap_p2p_comm": False},
            "batch_p2p_comm=True with",
        ),
        (P(), {"calculate_per_token_loss": False}, "calculate_per_token_loss=False divides"),
        (P(pipeline=2), {"variable_seq_lengths": False}, "variable_seq_lengths=False with stages"),
    ],
)
def test_a_config_that_trains_something_else_is_refused(
    parallel: ParallelConfig, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    import torch

    description = describe(read_hf_config(save_tiny(tmp_path, "qwen3")))
    config = transformer_config(description, parallel, torch.float32)
    refuse_hazards(config)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=complaint):
        refuse_hazards(config)


def roles_body(world: Any, folder: Path) -> Any:
    said = []
    cfg = config_of(folder, P())
    placement = Topology.create(cfg.parallel, seed=1)
    for build in (
        lambda: MegatronActor(cfg, placement, role="judge"),
        lambda: MegatronModelManager(cfg, placement).setup_model_and_optimizer("encoder"),
        lambda: build_actor(folder, P()).sync_model_to_rollout(version=1),
    ):
        try:
            build()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    reference = MegatronActor(cfg, placement, role="reference")
    pushed = build_actor(folder, P())
    pushed.push_to_rollout = lambda version: {"version": version}
    return said, reference.manager.optimizer, pushed.sync_model_to_rollout(version=3)


def test_what_an_actor_is_not_it_says(tmp_path: Path) -> None:
    said, optimizer, pushed = run_ranks(1, roles_body, save_tiny(tmp_path, "qwen3"))[0]
    wanted = (
        "role='judge' is unknown",
        "model_type=encoder is not supported",
        "has no rollout engine",
    )
    assert all(words in text for words, text in zip(wanted, said, strict=True)), said
    assert optimizer is None
    assert pushed == {"version": 3}
