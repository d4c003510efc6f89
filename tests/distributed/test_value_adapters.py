"""A value model with adapters: its head learns whole beside them, as in plain torch, under every
layout; nothing else does.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rftmega.algorithms.supervised import last_value, pairwise_loss
from rftmega.backends.megatron import adapters
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.core.errors import NothingTrained
from rftmega.run.placement.export import export
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.states import states
from rftmega.run.train import built_backend
from rftmega.runtime.device.residency import GRADIENTS
from rftmega.trainer.experience import given
from tests import plain_adapters
from tests.distributed.test_adapters import beside
from tests.distributed.test_critic import (
    PROMPTS,
    ROWS,
    experience_of,
    save_reward_model,
    square_loss,
)
from tests.layouts import build_value_model, config_of, rows_of
from tests.ranks import LOCAL, run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
RANK, ALPHA, STEPS = 4, 6.0, 3
TOLERANCE = 1e-5
PLAIN = OptimizerConfig(learning_rate=3e-3, epsilon=1e-4, weight_decay=0.1, clip_grad=0.5)
SHARDED = replace(PLAIN, distributed=True)
OVERLAPPED = replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True)
Case = tuple[int, ParallelConfig, OptimizerConfig]
LAYOUTS: dict[str, Case] = {
    "one process": (1, P(), PLAIN),
    "TP2": (2, P(tensor=2), PLAIN),
    "TP2, SP": (2, P(tensor=2, sequence=True), PLAIN),
    "PP2": (2, P(pipeline=2), PLAIN),
    "PP2 x VPP2": (2, P(pipeline=2, virtual_pipeline=2), SHARDED),
    "CP2": (2, P(context=2), PLAIN),
    "DP2, distributed optimizer": (2, P(), SHARDED),
    "full recompute": (1, P(recompute="full"), PLAIN),
    "PP2, full recompute": (2, P(pipeline=2, recompute="full"), PLAIN),
    "DP2, overlapped": (2, P(), OVERLAPPED),
    "TP2 x PP2, SP, full recompute": (4, P(tensor=2, pipeline=2, sequence=True, recompute="full"), SHARDED),
    "TP2 x CP2, SP, selective recompute": (4, P(tensor=2, context=2, sequence=True, recompute="selective"), SHARDED),
    "PP2 x VPP2 x DP2, overlapped": (4, P(pipeline=2, virtual_pipeline=2), OVERLAPPED),
}  # fmt: skip
QUICK = ("one process", "TP2, SP", "PP2, full recompute")
FIRST = list(LAYOUTS)[:10]
EXHAUSTIVE = list(LAYOUTS)[10:]


def critic_of(
    folder: Path, adapter: Path | str, case: Case, targets: tuple[str, ...] = (), **settings: Any
) -> Any:
    lora = LoRA(rank=RANK, alpha=ALPHA, targets=list(targets), path=str(adapter))
    return build_value_model(folder, case[1], case[2], lora=lora, **settings)


def learn(critic: Any, steps: int) -> list[tuple[float, float]]:
    found = []
    for _ in range(steps):
        metrics = critic.step(experience_of(), square_loss)
        found.append((metrics["loss"], metrics["grad_norm"]))
    return found


def learn_body(
    world: Any, folder: Path, adapter: Path, case: Case, targets: tuple[str, ...]
) -> tuple[Tensor, list[tuple[float, float]], Tensor]:
    critic = critic_of(folder, adapter, case, targets)
    rows = rows_of(ROWS, PROMPTS)
    frozen = [item.parameter.clone() for item in critic.manager.bound]
    before, told = critic.values(rows), learn(critic, STEPS)
    after = critic.values(rows)
    for was, item in zip(frozen, critic.manager.bound, strict=True):
        learns = item.hf_names[0].startswith("score.")
        assert torch.equal(was, item.parameter) != learns, item.hf_names
    return before, told, after


def in_columns(model: Any) -> Tensor:
    """[B, T]: what plain torch says of every token of `ROWS` but the last."""
    found = torch.zeros(rows_of(ROWS).mask.shape)
    with torch.no_grad():
        for place, row in enumerate(ROWS):
            found[place, : len(row) - 1] = plain_adapters.values(model, row)
    return found


def assert_learns_as_plain_torch(
    tmp_path: Path,
    variant: str,
    case: Case,
    targets: tuple[str, ...] = (),
    *,
    body: Callable[..., Any] = learn_body,
    preloaded: str = LOCAL,
) -> None:
    folder = save_reward_model(tmp_path, variant, bias=True)
    chosen = [name for name in targets if name != "lm_head"] or plain_adapters.ALL
    pairs = plain_adapters.random_pairs(tmp_path / "policy", rank=RANK, targets=chosen)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    model = plain_adapters.adapted(
        folder, pairs, alpha=ALPHA, kind=AutoModelForTokenClassification, num_labels=1
    )
    before = in_columns(model)
    wanted = plain_adapters.learn_values(
        model,
        ROWS,
        PROMPTS,
        experience_of().advantage,
        steps=STEPS,
        clip=PLAIN.clip_grad,
        lr=PLAIN.learning_rate,
        eps=PLAIN.epsilon,
        weight_decay=PLAIN.weight_decay,
        betas=(PLAIN.beta1, PLAIN.beta2),
    )
    assert wanted[-1][0] < wanted[0][0] - 0.05, "nothing was learnt, so nothing was compared"
    after = in_columns(model)
    ranks = run_ranks(case[0], body, folder, adapter, case, targets, preloaded=preloaded)
    for values, told, trained in ranks:
        torch.testing.assert_close(values, before, atol=TOLERANCE, rtol=TOLERANCE)
        for ours, theirs in zip(told, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)
        torch.testing.assert_close(trained, after, atol=2 * TOLERANCE, rtol=2 * TOLERANCE)


@pytest.mark.parametrize("name", beside(FIRST, QUICK))
def test_three_steps_of_a_value_model_with_adapters_are_those_of_plain_torch(
    name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name])


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_a_value_model_with_adapters_learns_as_in_plain_torch_in_larger_layouts(
    name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name])


@pytest.mark.parametrize(
    "name", ["TP2, SP", pytest.param("PP2, full recompute", marks=pytest.mark.ranks)]
)
def test_a_value_model_has_adapters_on_its_embedding_and_none_on_the_policys_head(
    name: str, tmp_path: Path
) -> None:
    targets = ("q_proj", "embed_tokens", "lm_head")
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name], targets)


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "name"), [("qwen2-tied", "PP2"), ("qwen3-moe", "CP2")])
def test_value_models_of_other_families_learn_as_in_plain_torch(
    variant: str, name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, LAYOUTS[name])


def memory_body(world: Any, folder: Path, case: Case) -> None:
    critic = critic_of(folder, "", case, dtype="bfloat16")
    learn(critic, 1)
    kept = {box.key.split("/")[1] for box in critic.training_tensors()}
    assert {key for key in kept if ".lora_" not in key} <= {"score.weight", "score.bias"}
    kinds = {box.key for box in critic.training_tensors() if box.key.endswith("/score.weight")}
    last = critic.topology.is_last_stage
    wanted = {"weights", "main", "exp_avg", "exp_avg_sq"} if last else set()
    assert {key.split("/")[0] for key in kinds} == wanted, "the head learns by halves"
    trained = sum(item.parameter.numel() for item in critic.manager.trained)
    bytes_of = critic.residency.bytes()
    assert bytes_of[GRADIENTS] >= 4 * trained
    cfg = critic.manager.cfg
    cfg.algorithm.task = "reward_model"
    planned = models_of(cfg, auto="float32", narrow_whole=False)[POLICY]
    stage = critic.topology.pipeline_rank
    assert bytes_of == states(planned, world.size, stage), "it was foretold otherwise"


@pytest.mark.parametrize("name", beside(["one process", "PP2", "TP2"], QUICK))
def test_adapters_and_head_alone_have_gradients_and_an_optimizers_state(
    name: str, tmp_path: Path
) -> None:
    folder = save_reward_model(tmp_path, "qwen3", bias=True)
    run_ranks(LAYOUTS[name][0], memory_body, folder, LAYOUTS[name])


PAIRS = [ids for number in range(6) for ids in ([5 + number, 9, 130], [5 + number, 9, 4])]


def scores_of(critic: Any) -> Tensor:
    rows = rows_of(PAIRS).with_end()
    return last_value(critic.values(rows), rows)


def reward_body(
    world: Any, folder: Path, case: Case, target: Path, backend: str
) -> tuple[Tensor, Tensor]:
    critic = critic_of(folder, "", case, backend=backend)
    before = scores_of(critic)
    for _ in range(4):
        critic.step(given(rows_of(PAIRS).with_end()), pairwise_loss(), group_size=2)
    critic.manager.finish_param_sync()
    export(critic, target, critic.manager.cfg.trainer)
    config = config_of(target, case[1], backend=backend)
    judge = built_backend(config).value_model(config, role="reward")
    after = scores_of(critic)
    torch.testing.assert_close(scores_of(judge), after, atol=TOLERANCE, rtol=TOLERANCE)
    return before, after


@pytest.mark.parametrize("name", beside(["TP2, SP", "PP2 x VPP2"], QUICK))
def test_a_reward_model_of_adapters_learns_and_its_two_folders_say_what_it_says(
    name: str, tmp_path: Path
) -> None:
    assert_reward_model_and_its_folders_agree(tmp_path, LAYOUTS[name], "megatron")


def assert_reward_model_and_its_folders_agree(tmp_path: Path, case: Case, backend: str) -> None:
    folder, target = save_tiny(tmp_path / "policy", "qwen3"), tmp_path / "reward"
    before, after = run_ranks(case[0], reward_body, folder, case, target, backend)[0]
    assert not before.any()
    margins = after[0::2] - after[1::2]
    assert margins.mean() > 0.05
    judge = AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        wanted = torch.cat([judge(torch.tensor([ids])).logits[:, 0] for ids in PAIRS])
    torch.testing.assert_close(after, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    beside = Path(f"{target}_adapter")
    said = json.loads((beside / "adapter_config.json").read_text())
    assert (said["task_type"], said["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert set(said["target_modules"]) == set(plain_adapters.ALL)
    written = load_file(beside / "adapter_model.safetensors")
    (head,) = [tensor for key, tensor in written.items() if ".lora_" not in key]
    merged = load_file(next(target.glob("*.safetensors")))
    assert torch.equal(head, merged["score.weight"])
    assert torch.equal(head, written["base_model.model.score.weight"])
    by_hand = plain_adapters.merged_by_hand(folder, beside)
    assert merged.keys() == by_hand.keys() - {"lm_head.weight"} | {"score.weight"}
    for key in merged.keys() & by_hand.keys():
        torch.testing.assert_close(merged[key], by_hand[key].float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp", marks=pytest.mark.ranks)])
def test_a_head_with_a_bias_is_a_token_classifiers_in_the_folder_of_adapters(
    backend: str,
    tmp_path: Path,
) -> None:
    folder = save_reward_model(tmp_path, "qwen3", bias=True)
    run_ranks(1, reward_body, folder, LAYOUTS["one process"], tmp_path / "out", backend)
    said = json.loads((tmp_path / "out_adapter" / "adapter_config.json").read_text())
    assert (said["task_type"], said["modules_to_save"]) == ("TOKEN_CLS", ["score"])
    written = load_file(tmp_path / "out_adapter" / "adapter_model.safetensors")
    assert {key for key in written if ".lora_" not in key} == {
        "base_model.model.score.weight",
        "base_model.model.score.bias",
    }


def lose_gradients() -> None:
    adapters.let_gradients_begin = lambda embedding: None


def lost_body(
    world: Any,
    folders: Sequence[Path],
    case: Case,
    lose: Callable[[], None],
    backend: str,
) -> list[tuple[int, str]]:
    """Of each folder: the steps that were taken without gradients, and what then was raised."""
    lose()
    found = []
    for folder in folders:
        critic = critic_of(folder, "", case, backend=backend)
        for taken in range(3):
            try:
                learn(critic, 1)
            except NothingTrained as raised:
                found.append((taken, str(raised)))
                break
    return found


def assert_lost_gradients_are_told(
    tmp_path: Path, case: Case, lose: Callable[[], None], backend: str
) -> None:
    reward = save_reward_model(tmp_path, "qwen3", bias=True)
    folders = (reward, tmp_path / "policy")
    for (at_once, said), (later, told) in run_ranks(
        case[0], lost_body, folders, case, lose, backend
    ):
        # a head at 0 gives them none in its first step
        assert (at_once, later) == (0, 1)
        assert "learn nothing but the head" in said
        assert "learn nothing but the head" in told


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_adapters_that_no_gradient_reaches_are_told_though_the_head_has_one(
    processes: int, tmp_path: Path
) -> None:
    """Of two processes each has half of the rows."""
    case = (processes, P(recompute="full"), SHARDED)
    assert_lost_gradients_are_told(tmp_path, case, lose_gradients, "megatron")
