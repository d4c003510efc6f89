"""A forward pass leaves the weights as they are, or the model is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, RwkvConfig

from rftmega.backends.decoder import describe
from rftmega.config import ParallelConfig
from rftmega.core.errors import CheckpointError
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks

ROWS = [[5, 9, 2, 40, 7], [1, 2, 3]]


def save_rwkv(folder: Path, vocabulary: int = 64) -> Path:
    """A model of 4 layers that halves the output weights of every second one."""
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=4,
        attention_hidden_size=32,
        rescale_every=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def body(world: Any, folder: Path, rescales: bool) -> Any:  # noqa: FBT001
    if rescales:
        describe.without_rescaling = lambda config: config  # type: ignore[assignment]
    policy = build_policy(folder, ParallelConfig(), backend="fsdp")
    before = policy.manager.sum_of_weights()  # type: ignore[attr-defined]
    try:
        logp = policy.log_probs(rows_of(ROWS)).logp
    except CheckpointError as error:
        return str(error)
    return logp, before == policy.manager.sum_of_weights()  # type: ignore[attr-defined]


def test_a_model_that_rescales_its_weights_is_computed_without(tmp_path: Path) -> None:
    folder = save_rwkv(tmp_path / "rwkv")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    for logp, unchanged in run_ranks(2, body, folder, False):
        assert unchanged
        for row, tokens in enumerate(ROWS):
            given = torch.tensor([tokens])
            wanted = model(given, use_cache=False).logits[0].log_softmax(-1)
            own = wanted[:-1].gather(-1, given[0, 1:, None])[:, 0].detach()
            found = logp[row, : len(own)].double()
            torch.testing.assert_close(found, own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_model_that_changes_its_weights_is_refused_with_their_names(
    processes: int, tmp_path: Path
) -> None:
    folder = save_rwkv(tmp_path / "rwkv")
    for said in run_ranks(processes, body, folder, True):
        assert "RwkvForCausalLM changes 8 of its own weights in its forward pass" in said
        assert "'rwkv.blocks.0.attention.output.weight' first" in said
