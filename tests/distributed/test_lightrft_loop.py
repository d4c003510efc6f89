"""A training loop written as LightRFT's pages describe it takes the steps of rftmega's own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rftmega.config import CriticConfig, OptimizerConfig, ParallelConfig, RolloutConfig
from rftmega.config.options.algorithms import GAE
from rftmega.core.types import Prompt
from rftmega.lightrft.strategy import is_actor
from tests.audio_rows import audio_rows, inputs_of, with_files
from tests.distributed.test_critic import save_reward_model
from tests.layouts import config_of
from tests.ranks import VLLM, run_ranks
from tests.tiny_audio import IM_END as AUDIO_STOP
from tests.tiny_audio import save_tiny_audio
from tests.tiny_models import save_tiny
from tests.tiny_vision import IM_END, images, save_tiny_vision

PRELOADED = VLLM
PROMPTS = [[15, 39, 40, 41], [33, 18]]


def strategy_of(
    world: Any,
    folder: Path,
    parallel: ParallelConfig,
    backend: str,
    stop: int,
    critic: CriticConfig | None = None,
) -> Any:
    from rftmega.lightrft.megatron_strategy import LightRFTStrategy
    from rftmega.run.placement.reinforcement import ReinforcementStrategy
    from rftmega.run.train import built_backend

    optimizer = OptimizerConfig(
        learning_rate=1e-3, epsilon=1e-4, clip_grad=0.0
    )  # no sign of a gradient near 0, and its size counts
    config = config_of(folder, parallel, optimizer, token_cap=400, backend=backend)
    config.rollout = RolloutConfig(
        engine="transformers", max_prompt_tokens=110, max_response_tokens=6, max_images=3
    )
    config.trainer.prompts_per_step, config.rollout.samples_per_prompt = 2, 4
    if critic is not None:
        config.critic = replace(critic, parallel=parallel, optimizer=optimizer)
        config.algorithm.advantage = GAE(gamma=0.9, lam=0.8)
    built = ReinforcementStrategy(config, world, built_backend(config), stop_ids=[stop])
    return LightRFTStrategy(built)


def likes_some(prompts: Any, rollouts: Any) -> Any:
    return [{"reward": float(sum(i % 7 for i in each.response_ids))} for each in rollouts]


def clipped_sum(logp: torch.Tensor, experience: Any) -> torch.Tensor:
    """PPO's clipped objective (arXiv:1707.06347, equation 7), summed over the response's tokens."""
    ratio = (logp - experience.action_log_probs).exp()
    advantage = experience.advantages
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(clipped * experience.action_mask).sum()


def weights_of(made: Any) -> dict[str, torch.Tensor]:
    from rftmega.weights import Exporter

    actor = made.unwrap_model(made.policy)
    gathered = Exporter(actor.shards(), actor.replica_group, bucket_bytes=2**20)
    return {name: x.clone() for name, x in gathered}


def text_body(
    world: Any, folder: Path, output: Path, parallel: ParallelConfig, backend: str
) -> dict[str, Any]:
    from rftmega.lightrft.actor_vl import ActorVL

    made = strategy_of(world, folder, parallel, backend, stop=1)
    found = loop(made, ActorVL(made.policy), output, [Prompt(tuple(ids)) for ids in PROMPTS], {})
    del found["experiences"]
    return found


def vision_body(
    world: Any, folder: Path, output: Path, parallel: ParallelConfig, backend: str
) -> dict[str, Any]:
    from rftmega.lightrft.actor_vl import ActorVL

    made = strategy_of(world, folder, parallel, backend, stop=IM_END)
    processor = made.processor
    vars(made)["processor"] = None  # the trainer has its own
    actor = ActorVL(made.policy, processor=processor)
    drawn = images()
    asked = {"all_images": [[drawn[0]], [drawn[1], drawn[2]]]}
    texts = ["what<image>?", "two<image>and<image>"]
    found = loop(made, actor, output, texts, asked, processor=processor)
    assert all(each.pixel_values is not None for each in found.pop("experiences"))
    return found


def audio_body(
    world: Any, folder: Path, output: Path, parallel: ParallelConfig, backend: str
) -> dict[str, Any]:
    from rftmega.lightrft.actor_al import ActorAL

    made = strategy_of(world, folder, parallel, backend, stop=AUDIO_STOP)
    tokens, placed = audio_rows(folder)
    pairs = [each for each in zip(tokens, placed, strict=True) if len(each[1]) == 1]
    (output / str(world.rank)).mkdir(parents=True)
    prompts = [
        Prompt(tuple(ids), images=with_files(output / str(world.rank), own)) for ids, own in pairs
    ]
    actor = ActorAL(made.policy, processor=made.audio_processor)
    heard = [inputs_of(ids, own) for ids, own in pairs]
    given = [
        {
            "audio_values": each["input_features"].repeat(4, 1, 1),
            "feature_attention_mask": each["feature_attention_mask"].repeat(4, 1),
        }
        for each in heard
    ]
    found = loop(made, actor, output / "checkpoints", prompts, {}, given)
    assert all(each.images is not None for each in found.pop("experiences"))
    return found


def loop(
    made: Any,
    actor: Any,
    output: Path,
    prompts: list[Any],
    asked: dict[str, Any],
    heard: Sequence[dict[str, torch.Tensor]] = ({}, {}),
    processor: Any = None,
) -> dict[str, Any]:
    """Two steps by PPOTrainerVL; the same from the same weights by backward and optimizer_step.

    `heard`: the waveforms of each batch, as an ActorAL takes them.
    """
    from rftmega.lightrft.ppo_trainer_vl import PPOTrainerVL

    made.setup_distributed()
    (actor_, optimizer, scheduler), critic, *_ = made.prepare_models_and_optimizers(
        actor, None, [], None, made.args, max_steps=100
    )
    assert actor_ is actor
    trainer = PPOTrainerVL(
        made, actor, None, likes_some, None, None, optimizer, None, scheduler, None,
        tokenizer=made.tokenizer, prompt_max_len=110, n_samples_per_prompt=4, micro_rollout_batch_size=4,
        processor=processor,
    )  # fmt: skip
    made.update_engine_weights(actor)
    answered = made.gather_and_generate({"temperature": 0.0}, all_prompt_token_ids=PROMPTS)
    assert all(1 <= len(each.output_token_ids) <= 6 for each in answered)
    made.update_engine_weights(actor)
    experiences = trainer.experience_maker.make_experience_list(
        prompts, n_samples_per_prompt=4, micro_rollout_batch_size=4, **asked
    )
    made.save_ckpt(actor, str(output), tag="start", client_state={"consumed_samples": 2})
    loader = made.setup_dataloader(experiences, 1, shuffle=False, collate_fn=lambda each: each[0])
    start = weights_of(made)
    own = []
    for number, experience in enumerate(loader):
        assert trainer.training_step(experience, number)["optimizer_steps"] == 1
        own.append(weights_of(made))
    _, state = made.load_ckpt(actor, str(output), tag="start")
    assert state == {"consumed_samples": 2}
    again = []
    for experience, waveforms in zip(loader, heard, strict=True):
        one_step(made, actor, experience, optimizer, scheduler, waveforms)
        again.append(weights_of(made))
    with pytest.raises(RuntimeError, match="Call backward first"):
        made.optimizer_step(optimizer, actor, scheduler)
    with torch.no_grad():
        scored = log_probs(actor, experiences[0], heard[0])
    assert not scored.requires_grad
    with pytest.raises(ValueError, match="outside torch.no_grad"):
        made.backward(scored.sum(), actor, optimizer)
    with pytest.raises(ValueError, match="Linear is not trained by this strategy"):
        made.backward(scored.sum(), torch.nn.Linear(2, 2), optimizer)
    made.update_engine_weights(actor)
    made.close()
    return {"start": start, "own": own, "again": again, "experiences": experiences}


def log_probs(actor: Any, experience: Any, heard: dict[str, torch.Tensor]) -> torch.Tensor:
    names = ("pixel_values", "image_grid_thw")
    given = {name: getattr(experience, name) for name in names}
    found: torch.Tensor = actor(
        experience.sequences,
        experience.action_mask.shape[1],
        experience.attention_mask,
        **{name: value for name, value in given.items() if value is not None},
        **heard,
    )
    return found


def one_step(
    made: Any,
    actor: Any,
    experience: Any,
    optimizer: Any,
    scheduler: Any,
    heard: dict[str, torch.Tensor],
) -> None:
    """Two backward passes of half of the mean over all tokens."""
    for _ in range(2):
        loss = clipped_sum(log_probs(actor, experience, heard), experience)
        half = loss / experience.action_mask.sum() / 2
        made.backward(half, actor, optimizer)
    made.optimizer_step(optimizer, actor, scheduler, name="actor")


LAYOUTS = {
    "fsdp": (ParallelConfig(), "fsdp"),
    "TP2": (ParallelConfig(tensor=2, sequence=True), "megatron"),
    "DP2": (ParallelConfig(), "megatron"),
    "CP2": (ParallelConfig(context=2), "megatron"),
}


def assert_alike(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["own"]) == len(found["again"]) == 2
        before = found["start"]
        for own, again in zip(found["own"], found["again"], strict=True):
            moved = max((own[name] - before[name]).abs().max().item() for name in own)
            assert moved > 1e-4, "a step of the trainer's own"
            for name, x in own.items():
                torch.testing.assert_close(again[name], x, rtol=0, atol=1e-6)
            before = own


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.ranks] if x == "fsdp" else []) for x in LAYOUTS],
)
def test_backward_and_optimizer_step_take_the_trainers_own_steps(
    layout: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3-tied")
    ranks = run_ranks(2, text_body, folder, tmp_path / "checkpoints", *LAYOUTS[layout])
    assert_alike(ranks)


@pytest.mark.parametrize("layout", [pytest.param("fsdp", marks=pytest.mark.ranks), "TP2"])
def test_so_they_do_with_images(layout: str, tmp_path: Path) -> None:
    folder = save_tiny_vision(tmp_path / "model", "qwen3_vl")
    assert_alike(run_ranks(2, vision_body, folder, tmp_path / "out", *LAYOUTS[layout]))


@pytest.mark.parametrize("layout", ["DP2"])
def test_so_they_do_with_waveforms(layout: str, tmp_path: Path) -> None:
    folder = save_tiny_audio(tmp_path / "model")
    assert_alike(run_ranks(2, audio_body, folder, tmp_path / "out", *LAYOUTS[layout]))


CLIP = 0.05  # of the values
SAFETY = {"a": 1.0, "b": -0.5}  # weights of two rewards by label


def weighed(rewards: list[torch.Tensor], **given: Any) -> torch.Tensor:
    """The rewards of two models, weighed by each prompt's label and a recipe."""
    assert given.keys() == {"labels", "label_map", "recipe"}
    weights = torch.tensor([given["label_map"][label] for label in given["labels"]])
    return weights * rewards[0] + given["recipe"]["second"] * rewards[1]


def likes_long(prompts: Any, rollouts: Any) -> Any:
    return [{"reward": float(len(each.response_ids))} for each in rollouts]


def critic_body(
    world: Any,
    folder: Path,
    value_model: Path,
    output: Path,
    parallel: ParallelConfig,
    backend: str,
) -> dict[str, Any]:
    from rftmega.lightrft.actor_vl import ActorVL
    from rftmega.lightrft.critic import Critic
    from rftmega.lightrft.ppo_trainer_vl import PPOTrainerVL

    chosen = CriticConfig(path=str(value_model))
    made = strategy_of(world, folder, parallel, backend, 1, chosen)
    made.setup_distributed()
    actor, critic = ActorVL(made.policy), Critic(made.critic)
    (_, optimizer, scheduler), (critic_, critic_optim, critic_scheduler), *_ = (
        made.prepare_models_and_optimizers(actor, critic, [], None, made.args, max_steps=100)
    )
    assert critic_ is critic
    assert is_actor(actor)
    assert not is_actor(critic)
    trainer = PPOTrainerVL(
        made, actor, critic, [likes_some, likes_long], None, None,
        optimizer, critic_optim, scheduler, critic_scheduler,
        tokenizer=made.tokenizer, prompt_max_len=110, value_clip=CLIP, reward_fn=weighed,
        reward_fn_label_map=SAFETY, reward_recipe={"second": 2.0}, save_hf_ckpt=True,
        n_samples_per_prompt=4, micro_rollout_batch_size=4,
    )  # fmt: skip
    made.update_engine_weights(actor)
    prompts = [Prompt(tuple(ids), label) for ids, label in zip(PROMPTS, SAFETY, strict=True)]
    first, second = trainer.experience_maker.make_experience_list(
        prompts, n_samples_per_prompt=4, micro_rollout_batch_size=4
    )
    learnt = [trainer.training_step(first, 0)]
    with torch.no_grad():
        moved = value_of(critic, second)
    learnt.append(trainer.training_step_critic(second))
    told = SimpleNamespace(ckpt_path=str(output / "kept"), save_path=str(output), save_steps=1)
    trainer.save_logs_and_checkpoints(told, 1, None, {"kl": 0.5}, {"consumed_samples": 8})
    with torch.no_grad():
        values = [value_of(critic, each) for each in (first, second)]
    made.load_ckpt(critic, str(output / "kept" / "_critic"), tag="global_step1")
    with pytest.raises(RuntimeError, match="Call backward first"):
        made.optimizer_step(critic_optim, critic, critic_scheduler, name="critic")
    by_own, by_step = two_ways(made, critic, first, output, trainer.value_loss_fn)
    made.close()
    return {
        "experiences": (first, second),
        "learnt": learnt,
        "moved": moved,
        "values": values,
        "steps": (by_own, by_step),
    }


def value_of(critic: Any, experience: Any) -> torch.Tensor:
    found: torch.Tensor = critic(
        experience.sequences, experience.action_mask.shape[1], experience.attention_mask
    )
    return found


def two_ways(
    made: Any, critic: Any, experience: Any, output: Path, value_loss: Any
) -> list[torch.Tensor]:
    """Values after a step by backward and optimizer_step, and after the same by critic.step."""
    from rftmega.lightrft.padded_experience import to_experience

    found = []
    for by_backward in (True, False):
        made.load_ckpt(critic, str(output / "kept" / "_critic"), tag="global_step1")
        if by_backward:
            values = value_of(critic, experience)
            assert values.requires_grad
            loss = clipped_square(values, experience, CLIP)
            made.backward(loss, critic, None)
            made.optimizer_step(None, critic, None, name="critic")
        else:
            critic.step(to_experience(experience), value_loss)
        with torch.no_grad():
            found.append(value_of(critic, experience))
    return found


def clipped_square(values: torch.Tensor, experience: Any, clip: float) -> torch.Tensor:
    """PPO's value loss (arXiv:2005.12729, section 3), the mean over the response's tokens."""
    old, target, mask = experience.values, experience.returns, experience.action_mask
    near = old + (values - old).clamp(-clip, clip)
    worse = torch.maximum((values - target) ** 2, (near - target) ** 2) / 2
    return worse[mask].mean()


def advantages_by_hand(
    values: list[float], rewards: list[float], gamma: float, lam: float
) -> list[float]:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16), token by token."""
    found, later = [], 0.0
    for place in reversed(range(len(values))):
        following = values[place + 1] if place + 1 < len(values) else 0.0
        later = rewards[place] + gamma * following - values[place] + gamma * lam * later
        found.append(later)
    return found[::-1]


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("TP2", marks=pytest.mark.ranks)])
def test_a_critic_learns_by_its_own_steps_and_by_backward(layout: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3-tied")
    value_model = save_reward_model(tmp_path, "qwen3-tied", bias=True)
    ranks = run_ranks(2, critic_body, folder, value_model, tmp_path / "out", *LAYOUTS[layout])
    judge = AutoModelForTokenClassification.from_pretrained(value_model, dtype=torch.float32)
    for found in ranks:
        first, second = found["experiences"]
        for experience, weight in ((first, 1.0), (second, -0.5)):
            rewards_and_advantages_are_right(experience, weight, judge)
        learnt, again = found["learnt"]
        expected = clipped_square(first.values, first, CLIP)
        assert learnt["critic_loss"] == pytest.approx(float(expected), rel=1e-6)
        assert "policy_loss" in learnt
        assert learnt["critic_optimizer_steps"] == 1
        assert again["critic_value_clip_fraction"] > 0, "the first step moved the values far"
        expected = clipped_square(found["moved"], second, CLIP)
        assert again["critic_loss"] == pytest.approx(float(expected), rel=1e-6)
        by_backward, by_step = found["steps"]
        torch.testing.assert_close(by_backward, by_step, rtol=0, atol=1e-6)
        assert (by_step - found["values"][0]).abs().max() > 1e-4, "a step"
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "global_step1")
    assert policy.config.model_type == "qwen3"
    assert (tmp_path / "out" / "kept" / "_actor" / "global_step1").is_dir()


def rewards_and_advantages_are_right(experience: Any, weight: float, judge: Any) -> None:
    """Against transformers' classifier, a sum by hand and the recursion of the paper."""
    for row in range(4):
        mask = experience.action_mask[row]
        length = int(mask.sum())
        given = experience.attention_mask[row].bool()
        ids = experience.sequences[row][given]
        with torch.no_grad():
            values = judge(ids[None]).logits[0, :, 0]
        states = values[len(ids) - length - 1 : -1]
        torch.testing.assert_close(experience.values[row][mask], states, rtol=0, atol=1e-5)
        response = ids[len(ids) - length :].tolist()
        reward = weight * sum(i % 7 for i in response) + 2.0 * length
        assert float(experience.info["reward"][row]) == pytest.approx(reward)
        wanted = advantages_by_hand(states.tolist(), [0.0] * (length - 1) + [reward], 0.9, 0.8)
        found = experience.advantages[row][mask].tolist()
        assert found == pytest.approx(wanted, abs=1e-4)
        returns = experience.returns[row][mask] - experience.values[row][mask]
        assert returns.tolist() == pytest.approx(wanted, abs=1e-4)


def refused_body(world: Any, folder: Path, parallel: ParallelConfig, overlaps: bool) -> None:
    from rftmega.lightrft.actor_vl import ActorVL
    from rftmega.lightrft.megatron_strategy import LightRFTStrategy
    from rftmega.run.placement.reinforcement import ReinforcementStrategy
    from rftmega.run.train import built_backend

    config = config_of(folder, parallel)
    config.optimizer.overlap_grad_reduce = overlaps
    config.rollout = RolloutConfig(engine="scripted", max_prompt_tokens=8, max_response_tokens=6)
    made = LightRFTStrategy(
        ReinforcementStrategy(config, world, built_backend(config), stop_ids=[1])
    )
    actor = ActorVL(made.policy)
    logp = actor(torch.tensor([[5, 9, 100, 4]]), 2)
    why = "overlap_grad_reduce=true" if overlaps else "parallel.pipeline=2 .* or set parallel.pip"
    with pytest.raises(NotImplementedError, match=why):
        made.backward(logp.sum(), actor, None)
    made.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_megatrons_schedule_alone_can_run_is_refused_with_the_reason(
    overlaps: bool, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3-tied")
    run_ranks(2, refused_body, folder, ParallelConfig(pipeline=1 if overlaps else 2), overlaps)
