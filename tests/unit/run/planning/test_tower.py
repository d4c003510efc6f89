"""A tower's activations against what torch really keeps, and where they are counted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen2AudioForConditionalGeneration,
)

from rftmega.config import ModelConfig, ParallelConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.model_providers.description import describe
from rftmega.model_providers.tower import AudioTower
from rftmega.run.planning import tower
from rftmega.run.planning.activations import Load
from rftmega.run.planning.fit import Machine
from rftmega.run.planning.memory import Budget, load_of, on_device
from rftmega.run.planning.models import POLICY, PlannedModel, models_of
from rftmega.run.planning.search import Search
from rftmega.run.planning.times import Speeds
from tests.tiny_audio import TOWER, audio_config
from tests.tiny_vision import KINDS, save_tiny_vision, vision_config

P = ParallelConfig
GRIDS = ((1, 16, 16), (1, 8, 24), (1, 12, 12))
PATCHES = 16 * 16 + 8 * 24 + 12 * 12


def larger(kind: str) -> dict[str, Any]:
    """Returns a config of a tower of 6 layers, of which a layer is most."""
    fields: dict[str, Any] = vision_config(kind, hidden_size=256, num_attention_heads=8).to_dict()
    width = {"embed_dim": 128} if kind == "qwen2_vl" else {"hidden_size": 128}
    own = {} if kind == "qwen2_vl" else {"intermediate_size": 384}
    fields["vision_config"] |= width | own | {"depth": 6, "num_heads": 4}
    return fields


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_and_what_is_around_keep_is_what_autograd_keeps_within_a_factor(
    kind: str,
) -> None:
    """Torch's norms and rotations of single operations keep a few more than fused ones."""
    fields = larger(kind)
    described = describe(fields)
    assert described.tower is not None
    model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**fields))
    visual = model.model.visual
    weights = {p.untyped_storage()._cdata for p in visual.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    patches = torch.randn(PATCHES, described.tower.patch_width)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        visual(patches, grid_thw=torch.tensor(GRIDS))
    measured = sum(storage.nbytes() for storage in kept.values())
    own = described.tower
    predicted = PATCHES * (
        own.depth * tower.block_bytes(own, 4) + tower.outside_bytes(own, described.hidden, 4)
    )
    print(kind, measured / predicted)  # for docs/planning.md
    assert 0.67 < measured / predicted < 1.5


@pytest.fixture
def planned(tmp_path: Path) -> tuple[PlannedModel, RunConfig]:
    config = RunConfig(
        model=ModelConfig(path=str(save_tiny_vision(tmp_path, "qwen3_vl"))),
        rollout=RolloutConfig(max_prompt_tokens=60, max_response_tokens=40, max_images=2),
        trainer=TrainerConfig(max_tokens_per_micro_batch=250),
    )
    return models_of(config)[POLICY], config


def test_the_first_stage_keeps_the_tower_of_each_micro_batch_in_flight(
    planned: tuple[PlannedModel, RunConfig],
) -> None:
    """Two blocks of width 32 and inner width 48, two of whose outputs go to the decoder as well."""
    policy, _ = planned
    block = 2 * (4 * 32 + 6 * 32 + 2 * 48) + 16 + 4 * 2
    outside = 2 * (3 * 2 * 16 * 16 + 3 * (4 * 32 + 128 / 4))
    features = 2 * 3 * 128 / 4
    load = Load(tokens=200, micro_batches=8)
    cases = (
        (P(), 1, 2 * block + outside, block),
        (P(pipeline=2), 2, 2 * block + outside, block),
        (P(pipeline=2, virtual_pipeline=2), 3, 2 * block + outside, block),
        (P(tensor=2, context=2), 1, 2 * block + outside, block),
        (P(recompute="full"), 1, 2 * 2 * 32 + outside, 2 * block),
    )
    for parallel, number, kept, working in cases:
        laid_out = replace(policy, parallel=parallel)
        assert tower.training(laid_out, 0, load, 480) == 480 * (number * kept + working)
        assert tower.training(laid_out, 1, load, 480) == 0
        assert tower.scoring(laid_out, 0, 480) == 480 * block
    frozen = replace(policy, frozen_tower=True)
    assert tower.training(frozen, 0, load, 480) == 480 * (features + block)


def test_patches_are_bounded_by_prompts_and_by_the_option(
    planned: tuple[PlannedModel, RunConfig],
) -> None:
    policy, config = planned
    load = load_of(config, config.parallel, 1)
    assert load.tokens == 200
    assert tower.patches_of(policy, config, load) == 2 * 60 * 4
    config.trainer.max_patches_per_micro_batch = 300
    assert tower.patches_of(policy, config, load) == 300
    config.rollout.max_images = 0
    assert tower.patches_of(policy, config, load) == 0


def test_a_device_of_the_first_stage_has_them_in_its_phases(
    planned: tuple[PlannedModel, RunConfig],
) -> None:
    policy, config = planned
    config.parallel = P(pipeline=2)
    models = {POLICY: replace(policy, parallel=config.parallel)}
    stages = [on_device(models, config, 2, {POLICY: stage}, Budget(1e9), 0) for stage in (0, 1)]
    patches = 2 * 60 * 4
    load = load_of(config, config.parallel, 2)
    assert stages[0]["score"]["tower"] == tower.scoring(models[POLICY], 0, patches) > 0
    assert stages[0]["update"]["tower"] == tower.training(models[POLICY], 0, load, patches) > 0
    assert not any("tower" in parts for parts in stages[1].values())
    assert not any("tower" in stages[0][phase] for phase in ("start", "rollout", "push"))


def test_fewer_patches_are_among_what_may_make_a_run_fit(
    planned: tuple[PlannedModel, RunConfig],
) -> None:
    policy, config = planned
    machine = Machine(1, Budget(1e9), Speeds(1e12, 1e12, 1e12, 1e12, 1e12, 8))

    def looked_at() -> list[dict[str, Any]]:
        axes = Search({POLICY: policy}, config, machine).axes()
        return [change for axis in axes for change in axis]

    fewer = {"trainer.max_patches_per_micro_batch": 60 * 4}
    assert fewer in looked_at()
    for bound in (60 * 4, 60 * 2):
        config.trainer.max_patches_per_micro_batch = bound
        assert fewer not in looked_at(), "it would not make a micro-batch smaller"


def test_of_sound_a_waveform_s_whole_window_is_kept(tmp_path: Path) -> None:
    """Against what autograd keeps, within a factor, as above."""
    fields = audio_config(hidden_size=256, num_attention_heads=8).to_dict()
    wide = {"d_model": 128, "encoder_ffn_dim": 384, "encoder_layers": 6}
    fields["audio_config"] = {**TOWER, **wide, "max_source_positions": 50}
    described = describe(fields)
    own = described.tower
    assert isinstance(own, AudioTower)
    model: Any = Qwen2AudioForConditionalGeneration(AutoConfig.for_model(**fields))
    audio_processor, out = model.model.audio_tower, model.model.multi_modal_projector
    weights = {
        p.untyped_storage()._cdata for part in (audio_processor, out) for p in part.parameters()
    }
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out(audio_processor(torch.randn(4, own.channels, 100)).last_hidden_state)
    measured = sum(storage.nbytes() for storage in kept.values())
    position = own.depth * tower.block_bytes(own, 4) + tower.outside_bytes(own, 256, 4)
    assert 0.67 < measured / (4 * own.positions * position) < 1.5
    config = RunConfig(rollout=RolloutConfig(max_images=3, max_prompt_tokens=9))
    assert tower.patches_of_prompt(described, config) == 3 * 50
