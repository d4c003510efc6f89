"""A policy's numbers and moves on one device: on a CUDA device with `make gpu`, and the same bodies on a CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftmega import device
from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.megatron.offload import ADAM, GRADIENTS, MAIN_PARAMETERS, PARAMETERS, PARTS
from rftmega.trainer.gap_gate import LIMITS
from rftmega.types import Experience
from rftmega.weights import Exporter
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny, transformers_logits

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = [[5, 9, 130, 2, 77], [3, 0], [(37 * i) % 131 for i in range(30)], [1, 2, 3, 4, 5, 6], [8, 8, 1], [9, 8, 7]]
PROMPTS = [2, 1, 4, 3, 1, 2]
OPTIMIZER = OptimizerConfig(epsilon=1e-4, learning_rate=1e-2, weight_decay=0.1, clip_grad=0.0, warmup_steps=0)
FAMILIES = ("qwen3", "qwen3-moe", "deepseek-v3")
EXACT = 1e-4  # nats


@pytest.fixture(autouse=True)
def _on_the_device(request: pytest.FixtureRequest) -> None:
    found = device.current().type
    wanted = request.node.callspec.params["where"]
    if wanted != found:
        pytest.skip(f"this process computes on {found}")


def score_body(world: Any, folder: Path, dtype: str) -> Any:
    actor = build_actor(folder, ParallelConfig(), dtype=dtype)
    assert {p.device.type for chunk in actor.manager.chunks for p in chunk.parameters()} == {device.current().type}
    return actor.log_probs(rows_of(ROWS)).logp


@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("variant", FAMILIES)
def test_log_probs_are_those_of_transformers(variant: str, where: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    wanted = transformers_logits(folder, ROWS)
    for dtype in ("float32", "bfloat16"):
        (found,) = run_ranks(1, score_body, folder, dtype)
        gaps = []
        for b, (row, logits) in enumerate(zip(ROWS, wanted, strict=True)):
            picked = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
            gaps.append((found[b, : len(row) - 1] - picked).abs())
        gap = torch.cat(gaps)
        if dtype == "float32":
            assert gap.max() < EXACT
        else:  # what a run may differ from its engine by
            assert gap.mean() < LIMITS[dtype].mean and gap.max() < LIMITS[dtype].percentile, (gap.mean(), gap.max())


def update_body(world: Any, folder: Path) -> Any:
    actor = build_actor(folder, ParallelConfig(), OPTIMIZER)
    rows = rows_of(ROWS, PROMPTS)
    logp = actor.log_probs(rows).logp
    experience = Experience(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, logp, logp, None, torch.ones_like(logp))
    for _ in range(2):
        actor.update(experience, policy_loss())
    return {name: x.cpu() for name, x in Exporter(actor.manager.bound, actor.topology, bucket_bytes=2**20)}


@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("variant", FAMILIES)
def test_two_updates_are_those_of_a_plain_loop_of_transformers_and_torch(variant: str, where: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    (found,) = run_ranks(1, update_body, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() == 1) is is_norm], "weight_decay": 0.0 if is_norm else 0.1}
        for is_norm in (False, True)
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    old = None
    for _ in range(2):
        picked = []
        for row, prompt in zip(ROWS, PROMPTS, strict=True):
            logp = model(torch.tensor([row])).logits[0].log_softmax(-1)
            picked.append(logp[torch.arange(prompt - 1, len(row) - 1), torch.tensor(row[prompt:], dtype=torch.int64)])
        flat = torch.cat(picked)
        old = flat.detach() if old is None else old
        ratio = (flat - old).exp()
        adam.zero_grad()
        (-torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()).backward()
        adam.step()
    theirs = dict(model.named_parameters())
    compared = found.keys() & theirs.keys()
    assert len(compared) > 10  # transformers keeps experts in one tensor, so those are compared by their log-probs alone
    for name in compared:
        torch.testing.assert_close(found[name], theirs[name].detach(), atol=5e-5, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def contents(residency: Any, part: str) -> list[torch.Tensor]:
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone()
        for storage in residency.storages()[part].values()
    ]


def cycles_body(world: Any, folder: Path) -> Any:
    actor = build_actor(folder, ParallelConfig(), replace(OPTIMIZER, distributed=True), dtype="bfloat16", keep_reference=True)
    rows = rows_of(ROWS, PROMPTS)
    logp = actor.log_probs(rows).logp
    experience = Experience(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, logp, logp, None, torch.ones_like(logp))
    actor.update(experience, policy_loss())
    residency = actor.manager.residency
    before = {part: contents(residency, part) for part in (PARAMETERS, MAIN_PARAMETERS, ADAM)}
    scored = actor.log_probs(rows).logp
    for _ in range(3):
        residency.only()
        assert residency.bytes() == dict.fromkeys(PARTS, 0)
        residency.only(PARAMETERS)
        assert torch.equal(actor.reference_log_probs(rows).logp, logp)
        assert torch.equal(actor.log_probs(rows).logp, scored)
        residency.on(*PARTS)
        for part, wanted in before.items():
            assert all(torch.equal(a, b) for a, b in zip(contents(residency, part), wanted, strict=True)), part
        assert not any(x.any() for x in contents(residency, GRADIENTS))
        residency.changed()
    return True


@pytest.mark.parametrize("where", ON)
def test_three_cycles_to_the_host_and_back_leave_every_bit_and_the_reference_beside(where: str, tmp_path: Path) -> None:
    assert run_ranks(1, cycles_body, save_tiny(tmp_path, "qwen3")) == [True]
