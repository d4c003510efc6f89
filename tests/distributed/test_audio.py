"""The model that hears, as Megatron computes it, is that of transformers, under every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2AudioForConditionalGeneration

from rftmega.backends.megatron import MegatronActor
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.data.media.audio_processor import audio_processor_of
from rftmega.lightrft.padded_experience import Samples
from rftmega.run.conversion import convert
from rftmega.runtime.parallel.topology import Topology
from rftmega.weights import Exporter
from tests.audio_rows import (
    audio_rows,
    inputs_of,
    prompts_of,
    rows_with_waveforms,
    transformers_log_probs,
)
from tests.distributed.test_vision import (
    INTERLEAVED,
    LAYOUTS,
    MORE,
    OVERLAPPED,
    UPDATES,
    P,
    likelihood,
)
from tests.layouts import build_actor, build_critic, config_of
from tests.ranks import LOCAL, TRANSFORMER_ENGINE, run_ranks
from tests.tiny_audio import save_tiny_audio
from tests.vision_rows import experience_of

# six processes, one row each: two have no waveform
LAYOUTS = LAYOUTS | {"DP6, overlapped": (6, P(), OVERLAPPED)}
QUICK = ("TP2, SP", "DP6, overlapped")
SINUSOIDS = "audio_tower.embed_positions.weight"


def body(
    world: Any,
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    settings: dict[str, Any],
) -> dict[str, Any]:
    config = config_of(folder, parallel, optimizer, token_cap=90)
    for section, options in settings.items():
        setattr(config, section, replace(getattr(config, section), **options))
    actor = MegatronActor(config, Topology.create(parallel, seed=1))
    rows = rows_with_waveforms(folder)
    before = actor.log_probs(rows.ragged()).logp.padded()
    steps = [actor.step(experience_of(rows), likelihood) for _ in range(UPDATES)]
    after = actor.log_probs(
        rows.ragged()
    ).logp.padded()  # waits for weights that are still gathered
    exporter = Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=20_000)
    weights = {name: tensor.clone() for name, tensor in exporter}
    return {
        "logp": (before, after),
        "norms": [step["grad_norm"] for step in steps],
        "weights": weights if world.rank == 0 else {},
    }


def trained(
    folder: Path, *, frozen: bool = False, rate: float = 1e-2
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any, list[float]]:
    """Log-probs before and after UPDATES steps of a plain loop, the model, gradient norms."""
    tokens, placed = audio_rows(folder)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    audio_processor = torch.nn.ModuleList(
        [model.model.audio_tower, model.model.multi_modal_projector]
    )
    # as the model is built; transformers forgets it when it reads a folder
    model.model.audio_tower.embed_positions.requires_grad_(False)
    if frozen:
        audio_processor.requires_grad_(False)
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = []
    for part, each in (
        (audio_processor, rate),
        (model.model.language_model, 1e-2),
        (model.lm_head, 1e-2),
    ):
        for decay in (0.0, 0.1):  # norms and biases do not decay
            chosen = [p for p in part.parameters() if (p.dim() > 1) == bool(decay)]
            groups.append({"params": chosen, "lr": each, "weight_decay": decay})
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1.0)
    norms = []
    first: list[torch.Tensor] = []
    for _ in range(UPDATES):
        logp = transformers_log_probs(model, tokens, placed)
        first = first or [row.detach() for row in logp]
        pairs = zip(logp, prompts_of(tokens), strict=True)
        completions = [row[prompt - 1 :] for row, prompt in pairs]
        adam.zero_grad()
        (-torch.cat(completions).mean()).backward()
        squares = [float(p.grad.double().square().sum()) for p in learning if p.grad is not None]
        norms.append(sum(squares) ** 0.5)
        adam.step()
    with torch.no_grad():
        last = transformers_log_probs(model, tokens, placed)
    return first, last, model, norms


def assert_learns_alike(
    layouts: dict[str, tuple[int, ParallelConfig, OptimizerConfig]],
    folder: Path,
    *,
    preloaded: str = LOCAL,
    frozen: bool = False,
    rate: float = 1e-2,
    **settings: Any,
) -> None:
    """`rate`: the tower's."""
    save_tiny_audio(folder)
    before, after, model, norms = trained(folder, frozen=frozen, rate=rate)
    model.save_pretrained(folder / "after")
    wanted, started = tensors_of(folder / "after"), tensors_of(folder)
    for name, (processes, parallel, optimizer) in layouts.items():
        found = run_ranks(
            processes, body, folder, parallel, optimizer, settings, preloaded=preloaded
        )
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
            if tensor == SINUSOIDS or (frozen and not tensor.startswith("language_model.")):
                assert torch.equal(value, started[tensor])
            else:
                assert moved > 0, (tensor, "nothing was learnt, so nothing was compared")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_two_updates_are_those_of_transformers(tmp_path: Path) -> None:
    assert_learns_alike({name: (LAYOUTS | MORE)[name] for name in QUICK}, tmp_path)


@pytest.mark.ranks
def test_two_updates_are_those_of_transformers_under_the_other_layouts(tmp_path: Path) -> None:
    every = LAYOUTS | MORE | INTERLEAVED
    layouts = {name: each for name, each in every.items() if name not in QUICK}
    assert_learns_alike(layouts, tmp_path)


def actor_body(world: Any, folder: Path, parallel: ParallelConfig) -> Any:
    """What ActorAL says of canvases, padded and packed, from frames of transformers."""
    from rftmega.lightrft.actor_al import ActorAL

    policy: Any = build_actor(folder, parallel, token_cap=90)
    rows = rows_with_waveforms(folder)
    _, placed = audio_rows(folder)
    given = [waveform for own in placed for waveform in own]
    frames = torch.stack([torch.as_tensor(waveform.source) for waveform in given])
    lengths = torch.tensor([waveform.frames for waveform in given])
    heard = {
        "audio_values": frames,
        "feature_attention_mask": (torch.arange(frames.shape[-1]) < lengths[:, None]).long(),
    }
    canvas = Samples.of(replace(rows, images=None), prompts=[], labels=[""] * len(rows))
    actor = ActorAL(policy, processor=audio_processor_of(folder))
    found = actor(canvas.sequences, canvas.num_actions, canvas.attention_mask, **heard)
    packed = canvas.packed()
    behind = ActorAL(policy, packing_samples=True, processor=audio_processor_of(folder))(
        packed.sequences, packed.num_actions, packed_seq_lens=packed.packed_seq_lens, **heard
    )
    asked = canvas.sequences, canvas.num_actions, canvas.attention_mask
    fewer = {name: value[:-1] for name, value in heard.items()}
    more = {name: torch.cat([value, value[:1]]) for name, value in heard.items()}
    short = {name: value[..., :-1] for name, value in heard.items()}
    for wrong, why in (
        ({"pixel_values": frames}, "hears and does not see"),
        ({"audio_values": frames}, "needs feature_attention_mask"),
        (fewer, "row 5 has .* placeholders"),
        (more, r"1 waveform\(s\) more than the rows have places for"),
        (short, "in windows of 100 frames"),
    ):
        with pytest.raises(ValueError, match=why):
            actor(*asked, **wrong)
    with pytest.raises(NotImplementedError, match="ActorAL.generate: an engine answers"):
        actor.generate(canvas.sequences)
    answered = actor(*asked, **heard, return_output=True, return_aligned_inputs=True)
    assert torch.equal(answered[0], found)
    assert torch.equal(answered[2], canvas.sequences)
    return found, behind, canvas.action_mask


def test_lightrft_s_actor_gives_the_log_probs_of_transformers(tmp_path: Path) -> None:
    save_tiny_audio(tmp_path)
    tokens, placed = audio_rows(tmp_path)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        rows = transformers_log_probs(model, tokens, placed)
    pairs = zip(rows, prompts_of(tokens), strict=True)
    wanted = torch.cat([row[prompt - 1 :] for row, prompt in pairs])
    for found, behind, mask in run_ranks(2, actor_body, tmp_path, ParallelConfig(tensor=2)):
        assert (found[mask.bool()] - wanted).abs().max() < 1e-5
        assert (behind[0] - wanted).abs().max() < 1e-5


@pytest.mark.ranks
def test_a_frozen_tower_stays_as_it_is_and_the_decoder_learns_all_the_same(tmp_path: Path) -> None:
    layouts = {"TP2 x PP2, SP": LAYOUTS["TP2 x PP2, SP"]}
    assert_learns_alike(layouts, tmp_path, frozen=True, model={"freeze_vision": True})


@pytest.mark.ranks
def test_a_tower_learns_at_a_rate_of_its_own(tmp_path: Path) -> None:
    layouts = {"DP4, overlapped": LAYOUTS["DP4, overlapped"]}
    own = {"vision_learning_rate": 1e-1}
    assert_learns_alike(layouts, tmp_path, rate=1e-1, optimizer=own)


@pytest.mark.ranks
def test_with_transformer_engine_s_modules_too(tmp_path: Path) -> None:
    layouts = {"one process": MORE["one process"], "TP2 x PP2, SP": LAYOUTS["TP2 x PP2, SP"]}
    assert_learns_alike(layouts, tmp_path, preloaded=TRANSFORMER_ENGINE)


def values_body(world: Any, folder: Path, parallel: ParallelConfig) -> torch.Tensor:
    critic = build_critic(folder, parallel)
    for item in critic.manager.bound:
        if "value_head" in item.rule.megatron[0]:
            weight = torch.linspace(-0.1, 0.1, item.parameter.numel())
            item.parameter.data.copy_(weight.view(item.parameter.shape))
    critic.manager.weights_changed()
    return critic.values(rows_with_waveforms(folder).ragged()).padded()


def test_a_critic_s_values_of_waveforms_are_those_of_transformers_hidden_states(
    tmp_path: Path,
) -> None:
    save_tiny_audio(tmp_path)
    tokens, placed = audio_rows(tmp_path)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    weight = torch.linspace(-0.1, 0.1, 128)
    found = run_ranks(2, values_body, tmp_path, ParallelConfig(pipeline=2))
    for row, (ids, own) in enumerate(zip(tokens, placed, strict=True)):
        with torch.no_grad():
            wanted = model.model(**inputs_of(ids, own)).last_hidden_state[0] @ weight
        for values in found:
            ours = values[row][: len(ids) - 1]
            torch.testing.assert_close(ours, wanted[:-1], atol=1e-5, rtol=1e-5)


def convert_body(world: Any, source: Path, target: Path, back: Path) -> None:
    convert.to_megatron(source, target, ParallelConfig(tensor=2, pipeline=2))
    convert.verify(source, target)
    convert.to_hf(target, back)


def test_a_converted_checkpoint_goes_back_byte_by_byte(tmp_path: Path) -> None:
    source, target, back = (tmp_path / name for name in ("source", "target", "back"))
    save_tiny_audio(source)
    run_ranks(1, convert_body, source, target, back)
    again, before = load_file(next(back.glob("*.safetensors"))), tensors_of(source)
    assert again.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.items())
    for file in ("preprocessor_config.json", "tokenizer.json"):
        assert (back / file).read_bytes() == (source / file).read_bytes()
