"""The model that sees, as Megatron computes it, is that of transformers, under every layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rftmega.backends.megatron import MegatronActor
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience, Rows, TokenLoss
from rftmega.run.conversion import convert
from rftmega.runtime.parallel.topology import Topology
from rftmega.weights import Exporter, export_hf_folder
from tests.layouts import build_critic, config_of
from tests.ranks import LOCAL, TRANSFORMER_ENGINE, run_ranks
from tests.tiny_vision import KINDS, by_matrix, save_tiny_vision
from tests.video_rows import rows_with_videos
from tests.vision_rows import (
    PROMPTS,
    experience_of,
    inputs_of,
    rows_with_images,
    transformers_log_probs,
    vision_rows,
)

P = ParallelConfig
# plain gradient descent would show gradients; Adam with a large epsilon is as good, and is what runs
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, epsilon=1.0, clip_grad=0.0, schedule="constant", weight_decay=0.1
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
    "DP4, overlapped": (4, P(), OVERLAPPED),  # of which one has no image
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
# A mixture takes tensor parallelism with sequence parallelism only.
MOE: dict[str, tuple[int, ParallelConfig, OptimizerConfig]] = {
    "EP2 x TP2, SP": (2, P(tensor=2, sequence=True, expert=2), OPTIMIZER),
    "EP2 x TP2 x ETP2, SP": (4, P(tensor=2, sequence=True, expert=2, expert_tensor=2), OPTIMIZER),
    "EP2 x PP2 x DP2, overlapped": (4, P(pipeline=2, expert=2), OVERLAPPED),
}
MORE_OF_MOE: dict[str, tuple[int, ParallelConfig, OptimizerConfig]] = {
    "EP2": (2, P(expert=2), OPTIMIZER),
    "EP4, distributed optimizer": (4, P(expert=4), SHARDED),
    "EP2 x CP2": (2, P(expert=2, context=2), OPTIMIZER),
    "EP2 x TP4, SP": (4, P(tensor=4, sequence=True, expert=2), OPTIMIZER),
    "EP2 x TP2 x PP2, SP, full recompute": (
        4,
        P(tensor=2, pipeline=2, sequence=True, expert=2, recompute="full"),
        SHARDED,
    ),
}
INTERLEAVED = {"PP2 x VPP2": (2, P(pipeline=2, virtual_pipeline=2), OPTIMIZER)}
# What planted bugs need, and a layout of each kind.
QUICK = {
    "qwen2_5_vl": ("PP2",),
    "qwen3_vl": ("DP4, overlapped",),
    "qwen3_vl_moe": ("EP2 x TP2, SP",),
}
UPDATES = 2


def layouts_of(kind: str, *, more: bool) -> dict[str, tuple[int, ParallelConfig, OptimizerConfig]]:
    """Returns a few layouts, or those `more` that the few have in them."""
    if "moe" in kind:
        every = LAYOUTS | MORE
        fits = {
            name: each for name, each in every.items() if each[1].tensor == 1 or each[1].sequence
        }
        every = MOE | fits | MORE_OF_MOE
    else:
        every = LAYOUTS | MORE | ({} if kind == "qwen3_vl" else INTERLEAVED)
    return {name: each for name, each in every.items() if (name in QUICK.get(kind, ())) != more}


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
    laid_out: Callable[[Path], Rows] = rows_with_images,
    token_cap: int = 90,
) -> dict[str, Any]:
    config = config_of(folder, parallel, optimizer, token_cap=token_cap)
    for section, options in settings.items():
        setattr(config, section, replace(getattr(config, section), **options))
    actor = MegatronActor(config, Topology.create(parallel, seed=1))
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


def trained(
    folder: Path,
    laid_out: Callable[[Path], Rows] = rows_with_images,
    *,
    frozen: bool = False,
    rate: float = 1e-2,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any, list[float]]:
    """Log-probs before and after UPDATES steps of a plain loop, the model, gradient norms."""
    rows = laid_out(folder)
    tokens = [ids[:end].tolist() for ids, end in zip(rows.tokens, rows.lengths, strict=True)]
    placed = [*rows.images.rows] if rows.images is not None else []
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.model.visual.requires_grad_(not frozen)
    learning = [p for p in model.parameters() if p.requires_grad]
    parts = (model.model.visual, rate), (model.model.language_model, 1e-2), (model.lm_head, 1e-2)
    groups = []
    for part, each in parts:
        for decay in (0.0, 0.1):  # norms and biases do not decay
            chosen = [p for p in part.parameters() if (p.dim() > 1) == bool(decay)]
            groups.append({"params": chosen, "lr": each, "weight_decay": decay})
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1.0)
    norms = []
    first: list[torch.Tensor] = []
    for _ in range(UPDATES):
        logp = transformers_log_probs(model, tokens, placed)
        first = first or [row.detach() for row in logp]
        completions = [
            row[prompt - 1 :] for row, prompt in zip(logp, rows.prompt_lengths, strict=True)
        ]
        adam.zero_grad()
        (-torch.cat(completions).mean()).backward()
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
    frozen: bool = False,
    rate: float = 1e-2,
    laid_out: Callable[[Path], Rows] = rows_with_images,
    token_cap: int = 90,
    **settings: Any,
) -> None:
    """`rate`: the tower's."""
    save_tiny_vision(folder, kind)
    before, after, model, norms = trained(folder, laid_out, frozen=frozen, rate=rate)
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
            if frozen and "visual." in tensor:
                assert torch.equal(value, started[tensor])
            else:
                assert moved > 0, (tensor, "nothing was learnt, so nothing was compared")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return by_matrix(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(
    "kind",
    list(QUICK),
)
def test_two_updates_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    assert_learns_alike(kind, layouts_of(kind, more=False), tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_are_those_of_transformers_under_the_other_layouts(
    kind: str, tmp_path: Path
) -> None:
    assert_learns_alike(kind, layouts_of(kind, more=True), tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_vl"])
def test_a_frozen_tower_stays_as_it_is_and_the_decoder_learns_all_the_same(
    kind: str, tmp_path: Path
) -> None:
    layouts = {
        "one process, full recompute": MORE["one process, full recompute"],
        "PP2": MORE["PP2"],
    }
    assert_learns_alike(kind, layouts, tmp_path, frozen=True, model={"freeze_vision": True})


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["TP2 x PP2, SP", "DP4, overlapped"])
def test_a_tower_learns_at_a_rate_of_its_own(layout: str, tmp_path: Path) -> None:
    own = {"vision_learning_rate": 1e-1}
    assert_learns_alike("qwen2_5_vl", {layout: LAYOUTS[layout]}, tmp_path, rate=1e-1, optimizer=own)


@pytest.mark.ranks
def test_micro_batches_of_few_patches_learn_the_same(tmp_path: Path) -> None:
    layouts = {"DP4, overlapped": LAYOUTS["DP4, overlapped"]}
    few = {"max_patches_per_micro_batch": 72, "max_tokens_per_micro_batch": 200}
    assert_learns_alike("qwen2_vl", layouts, tmp_path, trainer=few)


def values_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    critic = build_critic(folder, parallel)
    head = [
        item.parameter for item in critic.manager.bound if "value_head" in item.rule.megatron[0]
    ]
    with torch.no_grad():
        for parameter in head:
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    rows = rows_with_images(folder)
    values = critic.values(rows.ragged()).padded()
    experience = replace(experience_of(rows), returns=experience_of(rows).advantage)
    critic.manager.weights_changed()
    metrics = critic.step(experience, towards_one)
    return values, metrics["loss"], len(head)


def towards_one(stats: Any, experience: Experience) -> TokenLoss:
    weight = experience.mask.to(stats.value.dtype)
    return TokenLoss((stats.value - 1.0) ** 2, weight, experience.mask.sum(), {})


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.ranks)])
def test_a_critic_s_values_of_images_are_those_of_transformers_hidden_states(
    kind: str, tmp_path: Path
) -> None:
    save_tiny_vision(tmp_path, kind)
    tokens, placed = vision_rows(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    weight = torch.linspace(-0.1, 0.1, 128)
    wanted = [
        hidden_states(model, ids, own) @ weight for ids, own in zip(tokens, placed, strict=True)
    ]
    pairs = zip(wanted, PROMPTS, strict=True)
    squares = torch.cat([(row[prompt - 1 : -1] - 1.0) ** 2 for row, prompt in pairs])
    found = run_ranks(2, values_body, tmp_path, P(pipeline=2))
    for values, loss, _ in found:
        for ours, theirs in zip(values, wanted, strict=True):
            length = len(theirs) - 1
            torch.testing.assert_close(ours[:length], theirs[:-1], atol=1e-5, rtol=1e-5)
        assert loss == pytest.approx(float(squares.mean()), rel=1e-5)
    assert sum(heads for _, _, heads in found) == 1, "the last stage's process has the head"


@torch.no_grad()
def hidden_states(model: Any, ids: list[int], own: Any) -> torch.Tensor:
    """Returns [length, H] of transformers."""
    return model.model(**inputs_of(ids, own)).last_hidden_state[0]  # type: ignore[no-any-return]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_with_transformer_engine_s_modules_too(kind: str, tmp_path: Path) -> None:
    layouts = {name: MORE[name] for name in ("one process", "CP2")} | {
        "TP2 x PP2, SP": LAYOUTS["TP2 x PP2, SP"]
    }
    assert_learns_alike(kind, layouts, tmp_path, preloaded=TRANSFORMER_ENGINE)


def both_dtypes_body(world: Any, folders: list[Path]) -> list[list[torch.Tensor]]:
    """Log-probs of every token in float32 and in bfloat16, of each model."""
    found = []
    for folder in folders:
        rows = rows_with_images(folder)
        fed = torch.arange(rows.tokens.shape[1] - 1) < rows.lengths[:, None] - 1
        configs = [config_of(folder, P(), dtype=kind, token_cap=512) for kind in ROUGH]
        actors = [MegatronActor(config, Topology.create(P(), seed=1)) for config in configs]
        found.append([actor.log_probs(rows.ragged()).logp.padded()[fed] for actor in actors])
    return found


ROUGH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_far_from_float32_as_it_is_in_transformers(
    kind: str, tmp_path: Path
) -> None:
    """Over eight models."""
    folders = [save_tiny_vision(tmp_path / str(seed), kind, seed=seed) for seed in range(8)]
    (ours,) = run_ranks(1, both_dtypes_body, folders)
    theirs = []
    for folder in folders:
        pair = []
        for dtype in ROUGH.values():
            model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
            with torch.no_grad():
                pair.append(torch.cat(transformers_log_probs(model, *vision_rows(folder))).float())
        theirs.append(pair)
    torch.testing.assert_close(
        [pair[0] for pair in ours], [pair[0] for pair in theirs], atol=1e-5, rtol=0
    )
    noise, wanted = (
        sum(float((rough - fine).abs().mean()) for fine, rough in pairs) for pairs in (ours, theirs)
    )
    assert noise < 1.25 * wanted


def export_body(world: Any, source: Path, target: Path) -> None:
    parallel = P(tensor=2, sequence=True, expert=2)
    actor = MegatronActor(config_of(source, parallel), Topology.create(parallel, seed=1))
    exporter = Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=20_000)
    export_hf_folder(exporter, source, target, write=world.rank == 0)


def test_a_moe_is_exported_as_it_is_published(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny_vision(source, "qwen3_vl_moe")
    run_ranks(2, export_body, source, target)
    before = load_file(source / "model.safetensors")
    after = load_file(next(target.glob("*.safetensors")))
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def convert_body(
    world: Any, source: Path, target: Path, back: Path, parallel: ParallelConfig
) -> None:
    convert.to_megatron(source, target, parallel)
    convert.verify(source, target)
    convert.to_hf(target, back)


CONVERTED = {
    "qwen3_vl": LAYOUTS["TP2 x PP2, SP"],
    "qwen3_vl_moe": MOE["EP2 x TP2, SP"],
    "qwen2_vl": LAYOUTS["TP2 x PP2, SP"],
}


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_vl_moe",
        pytest.param("qwen3_vl", marks=pytest.mark.ranks),
        pytest.param("qwen2_vl", marks=pytest.mark.ranks),
    ],
)
def test_a_converted_checkpoint_is_the_same_model_and_goes_back_byte_by_byte(
    kind: str, tmp_path: Path
) -> None:
    source, target, back = (tmp_path / name for name in ("source", "target", "back"))
    save_tiny_vision(source, kind)
    processes, parallel, optimizer = CONVERTED[kind]
    run_ranks(1, convert_body, source, target, back, parallel)
    again = load_file(next(back.glob("*.safetensors")))
    before = load_file(source / "model.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.items())
    assert (back / "preprocessor_config.json").read_bytes() == (
        source / "preprocessor_config.json"
    ).read_bytes()
    found = run_ranks(processes, body, target, parallel, optimizer, {})
    first, last, model, _ = trained(source)
    model.save_pretrained(tmp_path / "after")
    for ours, theirs in zip(found[0]["logp"], (first, last), strict=True):
        pairs = zip(ours, theirs, strict=True)
        found_rows = torch.cat([row[: len(own)] for row, own in pairs])
        assert (found_rows - torch.cat(theirs)).abs().max() < 1e-5
    wanted = tensors_of(tmp_path / "after")
    for name, tensor in found[0]["weights"].items():
        assert (tensor - wanted[name]).abs().max() < 1e-5 * wanted[name].abs().max(), name


def test_two_updates_on_videos_and_images_are_those_of_transformers(tmp_path: Path) -> None:
    layouts = {"CP2": WITH_VIDEOS["CP2"]}
    assert_learns_alike("qwen3_vl", layouts, tmp_path, laid_out=rows_with_videos, token_cap=130)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_on_videos_and_images_are_those_of_transformers_under_the_other_layouts(
    kind: str, tmp_path: Path
) -> None:
    assert_learns_alike(kind, WITH_VIDEOS, tmp_path, laid_out=rows_with_videos, token_cap=130)
