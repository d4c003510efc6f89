"""ActorVL and PPOTrainerVL: what they take, and what they refuse."""

import inspect
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rftmega.core.types import COUNT, Metrics, Rows, TokenStats
from rftmega.lightrft.actor_vl import ActorVL
from rftmega.lightrft.padded_experience import Experience, of_experience
from rftmega.lightrft.ppo_trainer_vl import PPOTrainerVL
from rftmega.lightrft.strategy import is_actor
from tests.layouts import rows_of
from tests.vision_rows import experience_of


class Toy:
    """A policy that says of a target what its token is; notes what it learns from."""

    def __init__(self) -> None:
        self.trained: list[Any] = []

    def log_probs(self, rows: Rows, *, temperature: Any = None) -> TokenStats:
        padded = rows.padded() if not isinstance(rows.tokens, torch.Tensor) else rows
        return TokenStats(-padded.tokens[:, 1:].float() / 10, None)

    def step(self, experience: Any, loss_fn: Any, **settings: Any) -> Metrics:
        self.trained.append(experience)
        rows = experience.padded()
        loss = loss_fn(self.log_probs(rows.rows), rows)
        total = (loss.value * loss.weight).sum() / loss.count
        found = {name: each.value.mean().item() for name, each in loss.metrics.items()}
        return found | {
            "loss": total.item(),
            "optimizer_steps": 1.0,
            "skipped_steps": 0.0,
            f"{COUNT}tokens": 3.0,
        }


def strategy(**changes: Any) -> Any:
    config = SimpleNamespace(
        algorithm=SimpleNamespace(ema_beta=0.0), parallel=SimpleNamespace(recompute="none")
    )
    made = SimpleNamespace(
        config=config,
        args=SimpleNamespace(rollout_batch_size=2),
        micro_train_batch_size=5,
        train_batch_size=2,
        max_norm=1.0,
        seed=0,
        said=[],
    )
    made.print = lambda *words: made.said.append(" ".join(words))
    made.saved = []
    made.save_ckpt = lambda model, folder, tag, **more: made.saved.append((folder, tag, more))
    made.pushed = []
    made.update_engine_weights = made.pushed.append
    vars(made).update(changes)
    return made


def trainer(actor: Any = None, built: Any = None, **given: Any) -> PPOTrainerVL:
    judge = lambda prompts, rollouts: [{"reward": 1.0} for _ in rollouts]  # noqa: E731
    policy = actor or Toy()
    return PPOTrainerVL(
        built or strategy(), policy, None, judge, given.pop("initial_model", None), given.pop("ema_model", None),
        None, None, None, None, **given,
    )  # fmt: skip


def canvas() -> Experience:
    made = of_experience(experience_of(rows_of([[5, 6, 7, 8], [5, 9, 9]], [2, 1])))
    made.advantages = torch.ones_like(made.action_log_probs)
    return made


def test_the_constructor_takes_what_users_of_lightrft_give() -> None:
    found = inspect.signature(PPOTrainerVL).parameters
    assert " ".join(found) == (
        "strategy actor critic reward_model initial_model ema_model actor_optim critic_optim actor_scheduler "
        "critic_scheduler ema_beta init_kl_coef kl_target kl_horizon ptx_coef micro_train_batch_size buffer_limit "
        "buffer_cpu_offload eps_clip value_clip micro_rollout_batch_size gradient_checkpointing max_epochs max_norm "
        "tokenizer processor prompt_max_len dataloader_pin_memory remote_rm_url reward_fn reward_fn_label_map "
        "reward_recipe save_hf_ckpt disable_ds_ckpt generate_kwargs"
    )
    defaults = {name: each.default for name, each in found.items()}
    assert (defaults["ema_beta"], defaults["init_kl_coef"], defaults["kl_horizon"]) == (
        0.992,
        0.001,
        10_000,
    )
    assert (defaults["eps_clip"], defaults["value_clip"], defaults["prompt_max_len"]) == (
        0.2,
        0.2,
        128,
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_norm": 0.5}, "max_norm=0.5, and here it is 1.0: optimizer.clip_grad"),
        ({"micro_train_batch_size": 4}, "here it is 5: trainer.max_tokens_per_micro_batch"),
        ({"gradient_checkpointing": True}, "parallel.recompute"),
        ({"ptx_coef": 0.1}, "algorithm.ptx_coef"),
        ({"ema_beta": 0.5}, "algorithm.ema_beta"),
        ({"ema_model": object()}, "ema_model is not read"),
        ({"remote_rm_url": "http://x"}, "remote_rm_url is not read"),
    ],
)
def test_an_argument_that_something_else_decides_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        trainer(**given)
    trainer(micro_train_batch_size=5)


def test_the_kl_s_weight_and_the_clip_are_those_given() -> None:
    made = trainer(init_kl_coef=0.5, kl_target=6.0, kl_horizon=20)
    assert (made.kl_ctl.value, made.kl_ctl.target, made.kl_ctl.horizon) == (0.5, 6.0, 20)
    assert made.experience_maker.kl_controller is made.kl_ctl
    in_loss = strategy()
    in_loss.args.use_kl_loss = True
    other = trainer(built=in_loss, initial_model=Toy())
    assert other.experience_maker.kl_controller is None, "it is not counted twice"
    for clip, share in ((0.2, 1.0), (1.0, 0.0)):
        found = trainer(eps_clip=clip).training_step(unlikely(), 1)
        assert found["clip_fraction"] > 0 if share else found["clip_fraction"] == 0


def unlikely() -> Experience:
    """Tokens that have become far likelier since they were scored: a ratio of 1.6."""
    made = canvas()
    rows = rows_of([[5, 6, 7, 8], [5, 9, 9]], [2, 1])
    from rftmega.lightrft.padded_experience import per_action

    made.action_log_probs = per_action(Toy().log_probs(rows).logp, rows) - 0.47
    return made


def test_an_entropy_mask_keeps_tokens_out_of_the_loss() -> None:
    actor = Toy()
    mask = torch.zeros_like(canvas().action_log_probs)
    mask[0, 0] = 1
    found = trainer(actor).training_step_actor(canvas(), mask)
    assert not any(name.startswith(COUNT) for name in found)
    assert int(actor.trained[0].mask.flat.sum()) == 1


def test_the_buffer_is_trained_from_as_often_as_asked_in_steps_of_the_batch_s_size() -> None:
    actor = Toy()
    made = trainer(actor, max_epochs=3)
    made.replay_buffer = [canvas(), canvas()]
    found = made.ppo_train(4)
    assert [len(each) for each in actor.trained] == [2] * 6
    assert found["optimizer_steps"] == 6


def rolled(made: PPOTrainerVL) -> list[Any]:
    """Answers come from nowhere; returns what the maker was asked."""
    asked: list[Any] = []

    def make(prompts: Any, **given: Any) -> list[Experience]:
        asked.append((prompts, given))
        own = canvas()
        assert own.info is not None
        own.info["reward"] = torch.tensor([1.0, 0.0])
        return [own]

    made.experience_maker.make_experience_list = make  # type: ignore[method-assign,assignment]
    return asked


def test_a_fit_pushes_rolls_out_learns_and_saves_and_goes_on_where_it_was() -> None:
    built = strategy()
    made = trainer(built=built, n_samples_per_prompt=1)
    asked = rolled(made)
    args = SimpleNamespace(num_episodes=2, save_steps=3, ckpt_path="/x")
    batches = [
        {"prompts": ["a", "b"], "images": [None, None]},
        (["c", "d"], None, None, ["1", "2"]),
    ]
    made.fit(args, batches, None, consumed_samples=2, num_update_steps_per_episodes=2)
    assert [prompts for prompts, _ in asked] == [["c", "d"], ["a", "b"], ["c", "d"]]
    assert asked[0][1] == {
        "labels": ["1", "2"], "micro_rollout_batch_size": 8, "n_samples_per_prompt": 1,
    }  # fmt: skip
    assert asked[1][1]["all_images"] == [None, None]
    assert built.pushed == [made.actor] * 3
    ((folder, tag, more),) = built.saved
    assert (folder, tag) == ("/x/_actor", "global_step3")
    assert more["client_state"]["consumed_samples"] == 6
    assert len(built.said) == 3
    assert "rollout_reward 0.5" in built.said[0]
    assert made.replay_buffer == []
    with pytest.raises(ValueError, match="pretrain_dataloader is not read"):
        made.fit(args, batches, object())
    made.rollout({"prompts": ["a"], "videos": ["film"]})
    assert asked[-1][1]["all_videos"] == ["film"]


def test_the_oldest_rows_leave_a_buffer_with_a_limit_and_checkpoints_can_be_left_out() -> None:
    built = strategy()
    made = trainer(built=built, buffer_limit=4, disable_ds_ckpt=True)
    rolled(made)
    for _ in range(3):
        made.rollout((["a", "b"],))
    assert len(made.replay_buffer) == 2
    made.save_logs_and_checkpoints(SimpleNamespace(save_steps=1, ckpt_path="/x"), 1, None)
    assert built.saved == []


def test_where_the_buffer_lies_changes_nothing() -> None:
    plain, other = trainer(), trainer(buffer_cpu_offload=False, dataloader_pin_memory=False)
    assert plain.training_step(unlikely(), 1) == other.training_step(unlikely(), 1)
    rolled(other)
    other.rollout((["a", "b"],))
    assert other.replay_buffer[0].sequences.device.type == "cpu"
    assert not other.replay_buffer[0].sequences.is_pinned()


def test_metrics_are_written_to_tensorboard_and_wandb_as_the_arguments_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    args = SimpleNamespace(
        use_tensorboard=str(tmp_path / "board"), use_wandb="a-key", wandb_project="a-project",
        ckpt_path=str(tmp_path), logging_steps=2,
    )  # fmt: skip
    made = trainer(built=strategy())
    for step in (1, 2, 4):
        made.save_logs_and_checkpoints(args, step, None, {"policy_loss": step / 8})
    assert made.writers is not None
    made.writers.close()
    board = EventAccumulator(args.use_tensorboard).Reload()
    assert [(each.step, each.value) for each in board.Scalars("train/policy_loss")] == [
        (2, 0.25),
        (4, 0.5),
    ]
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    waited = time.monotonic() + 60  # another process writes it
    while b"train/policy_loss" not in written.read_bytes():
        assert time.monotonic() < waited
        time.sleep(0.1)
    assert b"a-project" in written.read_bytes()
    assert b"a-key" not in written.read_bytes()


def test_an_actor_is_a_policy_and_gives_the_log_probs_of_responses() -> None:
    policy = Toy()
    actor = ActorVL(policy)
    assert is_actor(actor)
    own = canvas()
    actions = own.action_log_probs.shape[1]
    found = actor(own.sequences, actions, own.attention_mask)
    assert found.tolist() == [pytest.approx([-0.7, -0.8]), pytest.approx([-0.9, -0.9])]
    both, stats = actor(own.sequences, actions, own.attention_mask, return_output=True)
    assert torch.equal(both, found)
    assert stats.logp.shape == (2, 3)


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"pixel_values_videos": torch.zeros(1)}, ValueError, "processor"),
        ({"video_grid_thw": torch.ones(1, 3)}, ValueError, "processor"),
        ({"num_actions": None}, ValueError, "asks for logits"),
        (
            {"pixel_values": torch.zeros(4, 2), "image_grid_thw": torch.ones(1, 3)},
            ValueError,
            "processor",
        ),
    ],
)
def test_what_an_actor_can_not_answer_it_refuses(given: Any, error: Any, why: str) -> None:
    own = canvas()
    asked = {"num_actions": 2, "attention_mask": own.attention_mask} | given
    with pytest.raises(error, match=why):
        ActorVL(Toy())(own.sequences, **asked)


def test_a_path_and_settings_that_something_else_decides_are_refused() -> None:
    with pytest.raises(ValueError, match="a strategy builds models"):
        ActorVL("a/folder")
    with pytest.raises(ValueError, match="bf16=True is not read here: model.dtype"):
        ActorVL(Toy(), bf16=True)
    with pytest.raises(NotImplementedError, match="gather_and_generate"):
        ActorVL(Toy()).generate(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="packing_samples needs packed_seq_lens"):
        ActorVL(Toy(), packing_samples=True)(torch.ones(1, 4), [2])
