"""LightRFT's names with images, end to end, beside plain transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.lightrft.actor_vl import ActorVL
from rftmega.lightrft.image_inputs import PATCHES
from rftmega.lightrft.padded_experience import (
    Experience,
    Samples,
    per_action,
    to_experience,
)
from rftmega.lightrft.ppo_trainer_vl import PPOTrainerVL
from tests.layouts import config_of
from tests.ranks import run_ranks
from tests.tiny_vision import FILM, IM_END, IMAGE, IMAGE_TEXT, VIDEO, images, save_tiny_vision
from tests.unit.data.media.test_videos import saved
from tests.vision_rows import (
    PROMPTS,
    rows_with_images,
    transformers_log_probs,
    vision_rows,
)

TEXTS = ["what<image>?", "nothing", f"two{IMAGE_TEXT}and<image>"]
NUMBERS = [1, 0, 2]
GREEDY = {"temperature": 0.0}


def strategy_of(world: Any, folder: Path, parallel: ParallelConfig, *, most_videos: int = 0) -> Any:
    from rftmega.backends.megatron import MegatronBackend
    from rftmega.lightrft.megatron_strategy import LightRFTStrategy
    from rftmega.run.placement.reinforcement import ReinforcementStrategy

    config = config_of(folder, parallel, token_cap=120)
    config.rollout = RolloutConfig(
        engine="transformers",
        max_prompt_tokens=110,
        max_response_tokens=5,
        max_images=3,
        max_videos=most_videos,
    )
    config.trainer.prompts_per_step, config.rollout.samples_per_prompt = 3, 2
    built = ReinforcementStrategy(config, world, MegatronBackend(), stop_ids=[IM_END])
    return LightRFTStrategy(built)


def likes_words(prompts: Any, rollouts: Any) -> Any:
    return [{"reward": float(sum(i % 7 for i in each.response_ids))} for each in rollouts]


def tensors(folder: Path, drawn: list[Any]) -> dict[str, torch.Tensor]:
    """What transformers' own processor makes of images."""
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="torchvision")
    made = processor(images=drawn, return_tensors="pt")
    return {name: made[name] for name in ("pixel_values", "image_grid_thw")}


def body(world: Any, folder: Path, output: Path, parallel: ParallelConfig) -> dict[str, Any]:
    made = strategy_of(world, folder, parallel)
    drawn = images()
    files = []
    for number, image in enumerate(drawn):
        files.append(str(output / f"{world.rank}-{number}.png"))
        image.save(files[-1])
    actor = ActorVL(made.policy, processor=made.processor)
    made.update_engine_weights(actor)
    flat = made.gather_and_generate(
        GREEDY, all_prompts=TEXTS, all_images=drawn, images_num=NUMBERS, sleep_engine=False
    )
    nested = made.gather_and_generate(
        GREEDY,
        all_prompt_token_ids=[each.prompt_token_ids for each in flat],
        all_images=[[files[0]], None, [Path(name).read_bytes() for name in files[1:]]],
        sleep_engine=False,
    )
    inputs = made._build_multimodal_inputs(TEXTS, drawn, NUMBERS, None, None)
    local = made.engine_generate_local(GREEDY, multi_modal_inputs=inputs)
    for given, why in (
        ({"all_videos": ["film"], "videos_num": [1, 0, 0]}, "rollout.max_videos is 0"),
        ({"all_images": drawn[:1], "images_num": [0, 1, 0]}, "placeholder"),
    ):
        here = given if world.rank == 0 else {}
        texts = TEXTS if world.rank == 0 else ["fine"]
        with pytest.raises(Exception, match=why) as caught:
            made.gather_and_generate(GREEDY, all_prompts=texts, **here)
        assert world.rank == 0 or isinstance(caught.value, EngineError)
    rows = rows_with_images(folder)
    canvas = Samples.of(rows, prompts=[], labels=[""] * len(rows))
    shown = [drawn[part] for part in (0, 1, 2, 1, 0, 1, 2)]
    patches = tensors(folder, shown)
    logp = actor(canvas.sequences, canvas.num_actions, canvas.attention_mask, **patches)
    packed_actor = ActorVL(made.policy, packing_samples=True, processor=made.processor)
    packed = canvas.packed()
    behind = packed_actor(
        packed.sequences, packed.num_actions, packed_seq_lens=packed.packed_seq_lens, **patches
    )
    trainer = PPOTrainerVL(
        made, actor, None, likes_words, None, None, None, None, None, None,
        tokenizer=made.tokenizer, prompt_max_len=70, n_samples_per_prompt=2, micro_rollout_batch_size=4,
    )  # fmt: skip
    maker = trainer.experience_maker
    made.update_engine_weights(actor)
    experiences = maker.make_experience_list(
        TEXTS, **tensors(folder, drawn), images_num=NUMBERS, n_samples_per_prompt=2
    )
    batch = {"prompts": TEXTS, "images": [[drawn[0]], None, drawn[1:]], "labels": ["", "", ""]}
    made.update_engine_weights(actor)
    rolled = trainer.rollout(batch)
    trained = trainer.ppo_train(1)
    made.update_engine_weights(actor)
    told = trainer.evaluate([batch], 1)
    assert told.keys() == {"eval_reward", "eval_response_length"}
    after = actor(canvas.sequences, canvas.num_actions, canvas.attention_mask, **patches)
    return {
        "flat": flat,
        "nested": nested,
        "local": local,
        "logp": (logp, behind, after),
        "mask": canvas.action_mask,
        "experiences": experiences,
        "trainer": (rolled, trained),
        "back": [to_experience(each, made.processor).images for each in experiences],
    }


@torch.no_grad()
def continued(model: Any, ids: list[int], given: dict[str, torch.Tensor]) -> list[int]:
    """The greedy answer of plain transformers."""
    row, completion = list(ids), list[int]()
    while len(completion) < 5 and IM_END not in completion:
        fed = torch.tensor([row])
        model.model.rope_deltas = None
        logits = model(fed, mm_token_type_ids=(fed == IMAGE).int(), **given).logits
        completion.append(int(logits[0, -1].argmax()))
        row.append(completion[-1])
    return completion


@pytest.mark.parametrize(
    ("kind", "processes", "parallel"),
    [
        pytest.param("qwen2_5_vl", 1, ParallelConfig(), marks=pytest.mark.ranks),
        ("qwen3_vl", 2, ParallelConfig(tensor=2)),
    ],
)
def test_answers_log_probs_and_experience_are_those_of_transformers(
    kind: str, processes: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny_vision(tmp_path / "model", kind)
    ranks = run_ranks(processes, body, folder, tmp_path, parallel)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    model.eval()
    drawn = images()
    seen = [tensors(folder, drawn[:1]), {}, tensors(folder, drawn[1:])]
    tokens, placed = vision_rows(folder)
    with torch.no_grad():
        told = transformers_log_probs(model, tokens, placed)
    wanted = torch.cat([row[prompt - 1 :] for row, prompt in zip(told, PROMPTS, strict=True)])
    for found in ranks:
        for completion, given in zip(found["flat"], seen, strict=True):
            expected = continued(model, completion.prompt_token_ids, given)
            assert completion.output_token_ids == expected
        features = [len(each.prompt_token_ids) for each in found["flat"]]
        assert features[0] > len("what?") + 2
        for other in ("nested", "local"):
            assert [each.output_token_ids for each in found[other]] == [
                each.output_token_ids for each in found["flat"]
            ]
        logp, behind, after = found["logp"]
        assert (logp[found["mask"]] - wanted).abs().max() < 1e-5
        assert torch.equal(behind[0], logp[found["mask"]])
        assert (after - logp).abs().max() > 1e-4, "nothing was learnt"
        rolled, trained = found["trainer"]
        assert rolled.keys() == {"rollout_reward", "rollout_response_length"}
        assert trained["skipped_steps"] == 0
        assert "policy_loss" in trained
        check_experiences(found["experiences"], found["back"], seen, model)


def check_experiences(
    experiences: list[Experience],
    back: list[Any],
    seen: list[dict[str, torch.Tensor]],
    model: Any,
) -> None:
    """Two answers to each prompt, side by side: their patches, and log-probs of transformers."""
    (whole,) = experiences
    twice = [given for given in seen for _ in range(2) if given]
    assert whole.pixel_values is not None
    assert whole.image_grid_thw is not None
    assert torch.equal(whole.pixel_values, torch.cat([each["pixel_values"] for each in twice]))
    assert torch.equal(whole.image_grid_thw, torch.cat([each["image_grid_thw"] for each in twice]))
    rows = to_experience(whole).rows
    for number in range(6):
        ids = rows.tokens[number, : rows.lengths[number]].tolist()
        own = back[0].rows[number]
        with torch.no_grad():
            (logp,) = transformers_log_probs(model, [ids], [own])
        mine = per_action(to_experience(whole).old_logp, rows)[number]
        prompt = int(rows.prompt_lengths[number])
        assert (mine[: len(ids) - prompt] - logp[prompt - 1 :]).abs().max() < 1e-5


FILM_TEXTS = [f"see{FILM}now", "no", f"{IMAGE_TEXT}or{FILM}"]


def films() -> list[Any]:
    """Two of 4 frames each, so wide that transformers puts the words behind them where they belong."""
    drawn = np.random.default_rng(5)
    return [list(drawn.integers(0, 256, (4, 56, width, 3), dtype=np.uint8)) for width in (192, 256)]


def films_body(world: Any, folder: Path, output: Path, parallel: ParallelConfig) -> dict[str, Any]:
    made = strategy_of(world, folder, parallel, most_videos=1)
    actor = ActorVL(made.policy, processor=made.processor)
    made.update_engine_weights(actor)
    first, second = films()
    kept = saved(output / f"film of {world.rank}", np.stack(first))  # a folder of frames
    given = {"all_images": [None, None, images()[:1]], "all_videos": [[first], None, [second]]}
    marks = [text.replace(FILM, "<video>").replace(IMAGE_TEXT, "<image>") for text in FILM_TEXTS]
    completions = [
        made.gather_and_generate(GREEDY, all_prompts=FILM_TEXTS, sleep_engine=False, **given),
        made.gather_and_generate(
            GREEDY,
            all_prompts=marks,
            sleep_engine=False,
            **given | {"all_videos": [str(kept), second], "videos_num": [1, 0, 1]},
        ),
    ]
    completions.append(
        made.gather_and_generate(
            GREEDY,
            all_prompt_token_ids=[each.prompt_token_ids for each in completions[0]],
            sleep_engine=False,
            **given,
        )
    )
    trainer = PPOTrainerVL(
        made, actor, None, likes_words, None, None, None, None, None, None,
        tokenizer=made.tokenizer, prompt_max_len=110, n_samples_per_prompt=2, micro_rollout_batch_size=6,
    )  # fmt: skip
    (experience,) = trainer.experience_maker.make_experience_list(
        FILM_TEXTS, n_samples_per_prompt=2, **given
    )
    canvas = experience.sequences, experience.action_mask.shape[1], experience.attention_mask
    patches = {name: getattr(experience, name) for name in PATCHES}
    again = actor(*canvas, **patches)
    batch = {"prompts": FILM_TEXTS, "images": given["all_images"], "videos": given["all_videos"]}
    made.update_engine_weights(actor)
    trainer.rollout(batch | {"labels": ["", "", ""]})
    trained = trainer.ppo_train(1)
    return {
        "answers": completions,
        "experience": experience,
        "again": again,
        "learnt": trained,
        "after": actor(*canvas, **patches),
    }


def seen_by_transformers(folder: Path) -> list[dict[str, Any]]:
    """What transformers' own processor makes of FILM_TEXTS; a pair of frames lasts a second."""
    processor: Any = AutoProcessor.from_pretrained(folder, backend="torchvision")
    first, second = films()
    media: list[dict[str, Any]] = [
        {"videos": [np.stack(first)]},
        {},
        {"videos": [np.stack(second)], "images": images()[:1]},
    ]
    found = []
    for text, given in zip(FILM_TEXTS, media, strict=True):
        about = [
            {"total_num_frames": len(film), "fps": 2.0, "frames_indices": [*range(len(film))]}
            for film in given.get("videos", [])
        ]
        more = {"video_metadata": about, "do_sample_frames": False} if about else {}
        found.append(dict(processor(text=[text], return_tensors="pt", **given, **more)))
    return found


@torch.no_grad()
def logits_of(model: Any, ids: list[int], given: dict[str, Any]) -> torch.Tensor:
    row = torch.tensor([ids])
    model.model.rope_deltas = None
    kinds = (row == IMAGE).int() + 2 * (row == VIDEO).int()
    media = {name: given[name] for name in given if "pixel" in name or "grid" in name}
    return model(row, mm_token_type_ids=kinds, **media).logits[0]


@pytest.mark.parametrize(
    ("kind", "processes", "parallel"),
    [
        ("qwen2_5_vl", 1, ParallelConfig()),
        pytest.param("qwen3_vl", 2, ParallelConfig(tensor=2), marks=pytest.mark.ranks),
    ],
)
def test_with_videos_too_answers_log_probs_and_patches_are_those_of_transformers(
    kind: str, processes: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny_vision(tmp_path / "model", kind)
    ranks = run_ranks(processes, films_body, folder, tmp_path, parallel)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    seen = seen_by_transformers(folder)
    for found in ranks:
        for completions in found["answers"]:
            for completion, given in zip(completions, seen, strict=True):
                ids = given["input_ids"][0].tolist()
                assert completion.prompt_token_ids == ids
                for token in completion.output_token_ids:
                    assert token == int(logits_of(model, ids, given)[-1].argmax())
                    ids.append(token)
        check_films(found["experience"], found["again"], seen, model)
        assert found["learnt"]["skipped_steps"] == 0
        assert (found["after"] - found["again"]).abs().max() > 1e-4, "nothing was learnt"


def check_films(
    experience: Experience, again: torch.Tensor, seen: list[dict[str, Any]], model: Any
) -> None:
    """Two answers to each prompt: patches, and log-probs of transformers."""
    for values in ("pixel_values", "pixel_values_videos"):
        wanted = torch.cat([each[values] for each in seen for _ in range(2) if values in each])
        assert torch.equal(getattr(experience, values), wanted)
    own = to_experience(experience)
    for number in range(6):
        ids = own.rows.tokens[number, : own.rows.lengths[number]].tolist()
        logp = logits_of(model, ids, seen[number // 2]).log_softmax(-1)
        prompt = int(own.rows.prompt_lengths[number])
        wanted = logp[prompt - 1 : -1].gather(-1, torch.tensor(ids[prompt:])[:, None])[:, 0]
        for mine in (per_action(own.old_logp, own.rows)[number], again[number]):
            assert (mine[: len(wanted)] - wanted).abs().max() < 1e-5
