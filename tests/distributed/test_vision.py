"""The model that sees, as Megatron computes it, is that of transformers, under every layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.types import Experience, Rows, TokenLoss
from rftmega.weights import Exporter
from tests.layouts import build_actor
from tests.ranks import LOCAL, TRANSFORMER_ENGINE, run_ranks
from tests.tiny_vision import KINDS, save_tiny_vision
from tests.video_rows import rows_with_videos
from tests.vision_rows import experience_of, rows_with_pictures, transformers_log_probs

P = ParallelConfig
# plain gradient descent would show gradients; Adam with a large epsilon is as good, and is what runs
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, epsilon=1.0, clip_grad=0.0, schedule="constant", weight_decay=0.0
)
SHARDED = replace(OPTIMIZER, distributed=True)
OVERLAPPED = replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS: dict[str, tuple[int, ParallelConfig, OptimizerConfig]] = {
    "TP2 x PP2, SP": (4, P(tensor=2, pipeline=2, sequence=True), OPTIMIZER),
    "TP2 x CP2, SP, full recompute": (
        4,
        P(tensor=2, context=2, sequence=True, recompute="full"),
        SHARDED,
    ),
    "DP2, overlapped": (2, P(), OVERLAPPED),
}
MORE: dict[str, tuple[int, ParallelConfig, OptimizerConfig]] = {
    "one process": (1, P(), OPTIMIZER),
    "one process, full recompute": (1, P(recompute="full"), OPTIMIZER),
    "one process, selective recompute": (1, P(recompute="selective"), OPTIMIZER),
    "TP2": (2, P(tensor=2), OPTIMIZER),
    "TP4": (4, P(tensor=4), OPTIMIZER),
    "TP2, SP": (2, P(tensor=2, sequence=True), OPTIMIZER),
    "PP2": (2, P(pipeline=2), OPTIMIZER),
    "PP2, first stage of 3 layers": (2, P(pipeline=2, first_stage_layers=3), OPTIMIZER),
    "CP2": (2, P(context=2), OPTIMIZER),
    "CP4": (4, P(context=4), OPTIMIZER),
    "PP2 x CP2": (4, P(pipeline=2, context=2), OPTIMIZER),
    "DP4, distributed optimizer": (4, P(), SHARDED),
    "TP2 x PP2 x DP2, SP, overlapped": (8, P(tensor=2, pipeline=2, sequence=True), OVERLAPPED),
}
WITH_VIDEOS = {
    "one process": MORE["one process"],
    "TP2 x PP2, SP": LAYOUTS["TP2 x PP2, SP"],
    "CP2": MORE["CP2"],
}
INTERLEAVED = {"PP2 x VPP2": (2, P(pipeline=2, virtual_pipeline=2), OPTIMIZER)}
UPDATES = 2


def likelihood(stats: Any, experience: Experience) -> TokenLoss:
    """The mean of all answers' tokens' surprise."""
    weight = experience.mask.to(stats.logp.dtype)
    return TokenLoss(-stats.logp, weight, experience.mask.sum(), {})


def body(
    world: Any,
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    settings: dict[str, Any],
    laid_out: Callable[[Path], Rows],
    token_cap: int,
) -> dict[str, Any]:
    actor = build_actor(folder, parallel, optimizer, token_cap=token_cap)
    for name, value in settings.items():
        setattr(actor.manager.cfg.trainer, name, value)
    rows = laid_out(folder).ragged()
    before = actor.log_probs(rows).logp.padded()
    experience = experience_of(laid_out(folder))
    steps = [actor.step(experience, likelihood) for _ in range(UPDATES)]
    after = actor.log_probs(rows).logp.padded()  # waits for weights that are still gathered
    exporter = Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=20_000)
    weights = {name: tensor.clone() for name, tensor in exporter}
    return {
        "logp": (before, after),
        "norms": [step["grad_norm"] for step in steps],
        "weights": weights if world.rank == 0 else {},
    }


def learnt(
    folder: Path, laid_out: Callable[[Path], Rows] = rows_with_pictures, *, frozen: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any, list[float]]:
    """Log-probs before and after UPDATES steps of a plain loop, the model, gradient norms."""
    rows = laid_out(folder)
    tokens = [ids[:end].tolist() for ids, end in zip(rows.tokens, rows.lengths, strict=True)]
    placed = [*rows.pictures.rows] if rows.pictures is not None else []
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.model.visual.requires_grad_(not frozen)
    learning = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(learning, lr=1e-2, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
    norms = []
    first: list[torch.Tensor] = []
    for _ in range(UPDATES):
        logp = transformers_log_probs(model, tokens, placed)
        first = first or [row.detach() for row in logp]
        answers = [row[prompt - 1 :] for row, prompt in zip(logp, rows.prompt_lengths, strict=True)]
        adam.zero_grad()
        (-torch.cat(answers).mean()).backward()
        squares = [float(p.grad.double().square().sum()) for p in learning if p.grad is not None]
        norms.append(sum(squares) ** 0.5)
        adam.step()
    with torch.no_grad():
        last = transformers_log_probs(model, tokens, placed)
    return first, last, model, norms


def assert_learns_alike(
    kind: str,
    layouts: dict[str, tuple[int, ParallelConfig, OptimizerConfig]],
    folder: Path,
    *,
    preloaded: str = LOCAL,
    laid_out: Callable[[Path], Rows] = rows_with_pictures,
    token_cap: int = 90,
    **settings: Any,
) -> None:
    save_tiny_vision(folder, kind)
    before, after, model, norms = learnt(folder, laid_out)
    model.save_pretrained(folder / "after")
    wanted = tensors_of(folder / "after")
    started = tensors_of(folder)
    for name, (processes, parallel, optimizer) in layouts.items():
        found = run_ranks(
            processes, body, folder, parallel, optimizer, settings, laid_out, token_cap,
            preloaded=preloaded,
        )  # fmt: skip
        for run in found:
            for ours, theirs in zip(run["logp"], (before, after), strict=True):
                pairs = zip(ours, theirs, strict=True)
                found_rows = torch.cat([row[: len(own)] for row, own in pairs])
                assert (found_rows - torch.cat(theirs)).abs().max() < 1e-5, name
            assert run["norms"] == pytest.approx(norms, rel=1e-5), name
        weights = found[0]["weights"]
        assert weights.keys() == wanted.keys(), name
        for tensor, value in weights.items():
            moved = (wanted[tensor] - started[tensor]).abs().max()
            difference = (value - wanted[tensor]).abs().max()
            # of the largest value, and of what was learnt
            assert difference < 1e-5 * wanted[tensor].abs().max(), (name, tensor)
            assert moved > 0, (tensor, "nothing was learnt, so nothing was compared")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    assert_learns_alike(kind, LAYOUTS, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_are_those_of_transformers_under_the_other_layouts(
    kind: str, tmp_path: Path
) -> None:
    more = {} if kind == "qwen3_vl" else INTERLEAVED
    assert_learns_alike(kind, MORE | more, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_with_transformer_engine_s_modules_too(kind: str, tmp_path: Path) -> None:
    layouts = {name: MORE[name] for name in ("one process", "CP2")} | {
        "TP2 x PP2, SP": LAYOUTS["TP2 x PP2, SP"]
    }
    assert_learns_alike(kind, layouts, tmp_path, preloaded=TRANSFORMER_ENGINE)


@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_on_videos_and_pictures_are_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    assert_learns_alike(kind, WITH_VIDEOS, tmp_path, laid_out=rows_with_videos, token_cap=130)
