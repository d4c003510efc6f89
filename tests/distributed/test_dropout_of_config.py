"""The dropout that a config.json tells of is the run's that made it: the update computes what a
scoring pass computes, on both backends, and engines compute it, too.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftmega.algorithms.losses import policy_loss
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks
from tests.tiny_decoders import save_decoder
from tests.tiny_models import save_tiny

TEXTS = [[1, 2, 3, 4, 9, 8], [5, 6, 7], [7, 8, 9, 10, 11], [3, 1, 2]]
P = ParallelConfig
DROPPED = {
    **{"attention_dropout": 0.5, "residual_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    **{"router_jitter_noise": 0.5, "hidden_dropout": 0.5, "embedding_dropout": 0.5},
}


def body(world: Any, folder: Path, parallel: ParallelConfig, backend: str, lora: LoRA) -> Any:
    """Log-probs of a scoring pass, of the update's own pass, and after it; the last on this
    process."""
    actor = build_policy(
        folder,
        parallel,
        OptimizerConfig(epsilon=1e-4, learning_rate=1e-2),
        backend=backend,
        lora=lora,
    )
    rows = rows_of(TEXTS)
    scored = actor.log_probs(rows).logp
    ones = torch.ones_like(scored)
    columns = (rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask)
    told: list[Any] = []
    actor.step(Experience(*columns, scored, None, None, ones), policy_loss(), scored=told.append)
    return scored, told[0].logp, actor.log_probs(rows).logp


def by_transformers(folder: Path) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            model(torch.tensor([text[:-1]]))
            .logits[0]
            .log_softmax(-1)
            .gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
            .tolist()
            for text in TEXTS
        ]


def with_dropout(folder: Path, variant: str, backend: str) -> Path:
    save = save_decoder if backend == "fsdp" else save_tiny
    save(folder, variant)
    said = json.loads((folder / "config.json").read_text())
    fields = {name: share for name, share in DROPPED.items() if name in said}
    assert fields, "this family says nothing of dropout"
    (folder / "config.json").write_text(json.dumps(said | fields))
    return folder


@pytest.mark.parametrize(
    ("backend", "variant", "parallel"),
    [
        pytest.param("fsdp", "qwen3", P(), marks=pytest.mark.ranks),
        pytest.param("fsdp", "granite", P(recompute="full"), marks=pytest.mark.ranks),
        ("fsdp", "phi3", P()),
        ("fsdp", "mixtral", P(recompute="full")),
        pytest.param("fsdp", "gpt-oss", P(), marks=pytest.mark.ranks),
        pytest.param("megatron", "llama", P(), marks=pytest.mark.ranks),
        ("megatron", "seed-oss", P(recompute="full")),
        pytest.param("megatron", "phi3", P(), marks=pytest.mark.ranks),
        pytest.param("megatron", "mixtral", P(), marks=pytest.mark.ranks),
    ],
)
def test_an_update_computes_what_a_scoring_pass_does_whatever_config_json_drops(
    backend: str, variant: str, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = with_dropout(tmp_path / "model", variant, backend)
    ((scored, trained, after),) = run_ranks(1, body, folder, parallel, backend, LoRA())
    assert not torch.allclose(scored, after, atol=1e-3), "the step moved nothing"
    torch.testing.assert_close(trained, scored, atol=2e-5, rtol=0)
    for row, wanted in enumerate(by_transformers(folder)):
        found = scored[row, : len(wanted)]
        torch.testing.assert_close(found, torch.tensor(wanted), atol=2e-5, rtol=0)


def test_adapters_dropout_is_the_only_one_that_an_update_has(tmp_path: Path) -> None:
    folder = with_dropout(tmp_path / "model", "qwen3", "fsdp")
    for share in (0.0, 0.5):
        lora = LoRA(rank=4, dropout=share, targets=["embed_tokens", "q_proj", "down_proj"])
        ((scored, trained, after),) = run_ranks(1, two_steps, folder, lora)
        assert torch.allclose(trained, scored, atol=2e-5) == (share == 0.0)
        assert not torch.allclose(scored, after, atol=1e-4)


def two_steps(world: Any, folder: Path, lora: LoRA) -> Any:
    """As `body`, of a second step: in the first an adapter's product is 0, dropped or not."""
    actor = build_policy(
        folder, P(), OptimizerConfig(epsilon=1e-4, learning_rate=3e-2), backend="fsdp", lora=lora
    )
    rows = rows_of(TEXTS)
    columns = (rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask)
    for _ in range(2):
        scored = actor.log_probs(rows).logp
        told: list[Any] = []
        experience = Experience(*columns, scored, None, None, torch.ones_like(scored))
        actor.step(experience, policy_loss(), scored=told.append)
    return scored, told[0].logp, actor.log_probs(rows).logp
