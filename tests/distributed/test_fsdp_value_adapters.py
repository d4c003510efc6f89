"""A value model with adapters on FSDP2: its head learns whole beside them, as in plain torch and as on
Megatron; nothing else does.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.config import ParallelConfig
from rftmega.core.errors import CheckpointError
from rftmega.models.lora import linear
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.states import states
from rftmega.runtime.device.residency import ADAM, PARAMETERS, PARTS
from tests.distributed.test_critic import PROMPTS, ROWS, save_reward_model
from tests.distributed.test_value_adapters import (
    PLAIN,
    TOLERANCE,
    Case,
    assert_learns_as_plain_torch,
    assert_lost_gradients_are_told,
    assert_reward_model_and_its_folders_agree,
    critic_of,
    learn,
)
from tests.layouts import rows_of
from tests.ranks import run_ranks

P = ParallelConfig
LAYOUTS: dict[str, Case] = {
    "FSDP 2, full recompute": (2, P(recompute="full"), PLAIN),
    "FSDP 1 x TP2": (2, P(tensor=2), PLAIN),
    "FSDP 1": (1, P(), PLAIN),
    "FSDP 2, ZeRO-2": (2, P(reshard_after_forward=False), PLAIN),
    "2 replicas": (2, P(replicas=2), PLAIN),
    "FSDP 2, on the host": (2, P(cpu_offload=True), PLAIN),
    "FSDP 3": (3, P(), PLAIN),
    "FSDP 2 x TP2, full recompute": (4, P(tensor=2, recompute="full"), PLAIN),
    "2 replicas x 2": (4, P(replicas=2), PLAIN),
}
EXHAUSTIVE = list(LAYOUTS)[2:]


def learn_body(
    world: Any, folder: Path, adapter: Path, case: Case, targets: tuple[str, ...]
) -> tuple[Tensor, list[tuple[float, float]], Tensor]:
    critic = critic_of(folder, adapter, case, targets, backend="fsdp")
    rows = rows_of(ROWS, PROMPTS)
    held = critic.manager.weights_held
    frozen = [weight.rows.clone() for weight in held]
    before, told = critic.values(rows), learn(critic, 3)
    after = critic.values(rows)
    for was, weight in zip(frozen, held, strict=True):
        learns = weight.name.startswith("score.") and weight.rows.numel() > 0
        assert torch.equal(was, weight.rows) != learns, weight.name
    return before, told, after


@pytest.mark.parametrize(
    "name", [pytest.param("FSDP 2, full recompute", marks=pytest.mark.ranks), "FSDP 1 x TP2"]
)
def test_three_steps_of_a_value_model_with_adapters_are_those_of_plain_torch(
    name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name], body=learn_body)


@pytest.mark.parametrize(
    "name", ["FSDP 2, full recompute", pytest.param("FSDP 1 x TP2", marks=pytest.mark.ranks)]
)
def test_a_value_model_learns_on_its_embedding_and_leaves_a_head_out(
    name: str, tmp_path: Path
) -> None:
    targets = ("o_proj", "embed_tokens", "lm_head")
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name], targets, body=learn_body)


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_a_value_model_with_adapters_learns_as_in_plain_torch_in_other_layouts(
    name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name], body=learn_body)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variant", "name"),
    [("qwen2-tied", "FSDP 1 x TP2"), ("qwen3-moe", "FSDP 2, full recompute")],
)
def test_value_models_of_other_families_learn_as_in_plain_torch(
    variant: str, name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, LAYOUTS[name], body=learn_body)


def memory_body(world: Any, folder: Path, case: Case) -> None:
    critic = critic_of(folder, "", case, dtype="bfloat16", backend="fsdp")
    learn(critic, 1)
    critic.residency.finish()
    boxes = [box.key.split("/") for box in critic.training_tensors()]
    assert {name for _, name in boxes if ".lora_" not in name} <= {"score.weight", "score.bias"}
    kinds = {kind for kind, name in boxes if name == "score.weight"}
    manager = critic.manager
    has_row = any(weight.rows.numel() for weight in manager.head)
    wanted = {"weights", "main", "exp_avg", "exp_avg_sq"} if has_row else set()
    assert kinds == wanted, "the head learns by halves"
    trained = {weight.rows.dtype for weight in manager.trained}
    frozen = {weight.rows.dtype for weight in manager.weights_held if not weight.learns}
    assert (trained, frozen) == ({torch.float32}, {torch.bfloat16})
    cfg = manager.cfg
    cfg.algorithm.task = "reward_model"
    planned = states(models_of(cfg)[POLICY], world.size, 0)
    found = critic.residency.bytes()
    if has_row:  # a plan knows no bias: a number of each kind
        assert found[PARAMETERS] == planned[PARAMETERS] + 4 + 2
        assert found[ADAM] == planned[ADAM] + 8


@pytest.mark.parametrize("name", ["FSDP 2, full recompute"])
def test_adapters_and_head_alone_have_main_parameters_and_an_optimizers_state(
    name: str, tmp_path: Path
) -> None:
    folder = save_reward_model(tmp_path, "qwen3", bias=True)
    run_ranks(LAYOUTS[name][0], memory_body, folder, LAYOUTS[name])


@pytest.mark.parametrize(
    "name",
    ["FSDP 2, full recompute", pytest.param("FSDP 1 x TP2", marks=pytest.mark.ranks)],
)
def test_a_reward_model_of_adapters_learns_and_its_two_folders_say_what_it_says(
    name: str, tmp_path: Path
) -> None:
    assert_reward_model_and_its_folders_agree(tmp_path, LAYOUTS[name], "fsdp")


def lose_gradients() -> None:
    linear.LinearWithPair.with_product = (  # type: ignore[method-assign]
        lambda self, x, completion: completion + 0 * self.lora_B(self.lora_A(x))
    )


def test_adapters_that_no_gradient_reaches_are_told_though_the_head_has_one(
    tmp_path: Path,
) -> None:
    """Of two processes the first alone has the head's row."""
    assert_lost_gradients_are_told(tmp_path, (2, P(), PLAIN), lose_gradients, "fsdp")


def kept_by(critic: Any, folder: Path) -> TrainingCheckpoints:
    return TrainingCheckpoints(folder, {"critic": critic}, critic.manager.cfg)


def save_body(
    world: Any, model: Path, folder: Path, case: Case, backend: str, dtype: str
) -> list[tuple[float, float]]:
    critic = critic_of(model, "", case, backend=backend, dtype=dtype)
    learn(critic, 2)
    checkpoints = kept_by(critic, folder)
    checkpoints.save({}, step=2)
    told = learn(critic, 2)
    checkpoints.wait()
    return told


def resume_body(
    world: Any, model: Path, folder: Path, case: Case, backend: str, dtype: str
) -> list[tuple[float, float]] | str:
    critic = critic_of(model, "", case, backend=backend, dtype=dtype)
    critic.residency.only()  # as a colocated run holds it when it resumes
    try:
        kept_by(critic, folder).load(folder / "step_000002")
    except CheckpointError as raised:
        return str(raised)
    critic.residency.on(*PARTS)
    return learn(critic, 2)


def resumes_body(world: Any, models: Sequence[Path], folder: Path, case: Case) -> list[Any]:
    """Of each model."""
    return [resume_body(world, model, folder, case, "fsdp", "bfloat16") for model in models]


def test_a_critic_of_adapters_goes_on_bit_for_bit_and_on_its_own_base_alone(
    tmp_path: Path,
) -> None:
    model, folder = save_reward_model(tmp_path, "qwen3", bias=True), tmp_path / "kept"
    case = LAYOUTS["FSDP 2, full recompute"]
    expected, *_ = run_ranks(2, save_body, model, folder, case, "fsdp", "bfloat16")
    # its head is in the checkpoint, so another one in the folder is no other base
    models = [
        changed(model, tmp_path / name, name) for name in ("score.weight", "model.norm.weight")
    ]
    for found, told in run_ranks(2, resumes_body, models, folder, case):
        assert found == expected
        assert "belong to other weights" in told


def changed(model: Path, folder: Path, name: str) -> Path:
    """Another folder, with one tensor halved."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name] / 2
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("fsdp", "megatron"),
        pytest.param("megatron", "fsdp", marks=pytest.mark.ranks),
    ],
)
def test_a_checkpoint_of_a_critic_is_read_under_the_other_backend(
    saved: str, resumed: str, tmp_path: Path
) -> None:
    model, folder = save_reward_model(tmp_path, "qwen3", bias=True), tmp_path / "kept"
    two, one = (2, P(tensor=2), PLAIN), (1, P(), PLAIN)
    expected, *_ = run_ranks(2, save_body, model, folder, two, saved, "float32")
    (found,) = run_ranks(1, resume_body, model, folder, one, resumed, "float32")
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
