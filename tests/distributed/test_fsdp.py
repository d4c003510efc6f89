"""Models on torch's FSDP2: what is scored, stepped, kept and resumed is what Megatron's are; further
layouts are in tests/invariance.py.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.backends.fsdp.sharding import local
from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rftmega.core.errors import CheckpointError
from rftmega.run.placement.export import export
from rftmega.run.train import built_backend
from rftmega.runtime.device.residency import GRADIENTS, PARTS
from rftmega.trainer.experience import given
from rftmega.weights import Exporter
from tests.allocations import most_bytes
from tests.chosen import chosen
from tests.distributed import test_critic
from tests.distributed.test_checkpoints import tensors
from tests.distributed.test_offload import contents, prepared_by
from tests.layouts import build_policy, build_value_model, config_of, rows_of
from tests.ranks import RankFailure, run_ranks
from tests.tiny_decoders import save_decoder
from tests.tiny_models import save_tiny
from tests.tiny_vision import KINDS, save_tiny_vision

P = ParallelConfig
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, epsilon=1e-4, schedule="linear", warmup_steps=2, weight_decay=0.1
)
SHARDED = replace(OPTIMIZER, distributed=True)
TOKENS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11], [3, 1, 2], [12, 13, 14], [9, 9]]


def exported(model: Any) -> dict[str, torch.Tensor]:
    model.residency.finish()
    exporter = Exporter(model.shards(), model.replica_group, bucket_bytes=20_000)
    return {name: tensor.clone() for name, tensor in exporter}


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    distances = [
        float((found[name].float() - tensor.float()).abs().max() / tensor.abs().max())
        for name, tensor in wanted.items()
    ]
    return max(distances)


def averaged_body(world: Any, folder: Path, parallel: ParallelConfig, **settings: Any) -> Any:
    """What a policy weighs after three steps, and its average; both before and after scoring with
    the reference.
    """
    config = config_of(folder, parallel, OPTIMIZER, keep_reference=True, **settings)
    config.algorithm.ema_beta = 0.5
    actor = built_backend(config).policy(config)
    rows = rows_of(TOKENS)
    start = actor.log_probs(rows).logp
    steps = [actor.step(given(rows), cross_entropy_loss()) for _ in range(3)]
    losses = [(metrics["loss"], metrics["grad_norm"]) for metrics in steps]
    trained = actor.log_probs(rows).logp
    assert torch.equal(actor.reference_log_probs(rows).logp, start)
    assert torch.equal(actor.log_probs(rows).logp, trained)
    assert (trained - start).abs().max() > 0.1
    weights, context = exported(actor), actor.averaged()
    assert context is not None
    with context:
        average = exported(actor)
    back = exported(actor)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    return losses, trained, weights, average


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_average_and_reference_are_those_of_megatron(
    dtype: str, bound: float, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen2-tied")
    (wanted,) = run_ranks(1, partial(averaged_body, dtype=dtype), folder, P())
    body = partial(averaged_body, dtype=dtype, backend="fsdp")
    # whatever was gathered for a pass must not serve the next one
    for found in run_ranks(2, body, folder, P(reshard_after_forward=False)):
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert ours == pytest.approx(theirs, rel=bound)
        torch.testing.assert_close(found[1], wanted[1], atol=4 * bound, rtol=bound)
        assert worst(found[2], wanted[2]) < bound
        assert worst(found[3], wanted[3]) < bound
        assert worst(found[2], found[3]) > 1e-3, "the average is the weights, so none was compared"


def critic_body(world: Any, folder: Path, parallel: ParallelConfig, backend: str) -> Any:
    critic = build_value_model(folder, parallel, test_critic.OPTIMIZER, backend=backend)
    experience = test_critic.experience_of()
    before = critic.values(experience.rows)
    metrics = [critic.step(experience, test_critic.square_loss) for _ in range(3)]
    return before, metrics, critic.values(experience.rows), exported(critic)


def critics_body(world: Any, folders: dict[str, Path], backend: str) -> dict[str, Any]:
    return {start: critic_body(world, folder, P(), backend) for start, folder in folders.items()}


def critic_folder(folder: Path, start: str) -> Path:
    if start.endswith("policy"):
        return save_tiny(folder, "qwen2-tied" if "tied" in start else "qwen3")
    return test_critic.save_reward_model(folder, "qwen3", bias="bias" in start)


@pytest.fixture(scope="module")
def critics(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """By what a critic starts from: what it learns under Megatron, and in each process of FSDP2."""
    folders = {
        start: critic_folder(tmp_path_factory.mktemp("critic"), start)
        for start in chosen(request, "start")
    }
    wanted = run_ranks(1, critics_body, folders, "megatron")
    found = run_ranks(2, critics_body, folders, "fsdp")
    return {start: [each[start] for each in (*wanted, *found)] for start in folders}


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("a reward model", marks=pytest.mark.ranks),
        "with a bias",
        pytest.param("a policy", marks=pytest.mark.ranks),
        "a tied policy",
    ],
)
def test_a_critic_learns_as_under_megatron(start: str, critics: dict[str, list[Any]]) -> None:
    wanted, *found = critics[start]
    for each in found:
        test_critic.assert_equal(each, wanted, start)


def phases_body(world: Any, folder: Path, parallel: ParallelConfig, dtype: str) -> None:
    """Two updates with everything moved between all phases, against two without."""
    runs = []
    for offload in (False, True):
        actor = build_policy(
            folder, parallel, OPTIMIZER, dtype=dtype, token_cap=120, backend="fsdp"
        )
        experience, residency = prepared_by(actor, folder), actor.residency
        found = []
        for _ in range(2):
            found.append(actor.step(experience, policy_loss()))
            if offload:
                residency.finish()
                before, full = contents(residency), residency.bytes()
                residency.off(*PARTS)
                assert residency.bytes() == dict.fromkeys(PARTS, 0)
                residency.on(*PARTS)
                assert residency.bytes() == full
                after = contents(residency)
                for part in set(PARTS) - {GRADIENTS}:
                    pairs = zip(before[part], after[part], strict=True)
                    assert all(torch.equal(old, new) for old, new in pairs), part
        runs.append((found, actor.log_probs(experience.rows).logp, exported(actor)))
    (steps, logp, weights), (moved_steps, moved_logp, moved_weights) = runs
    assert steps == moved_steps
    assert torch.equal(logp, moved_logp)
    assert all(torch.equal(moved_weights[name], tensor) for name, tensor in weights.items())


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_does_not_notice_that_its_parts_leave_the_device(
    dtype: str, tmp_path: Path
) -> None:
    run_ranks(2, phases_body, save_tiny(tmp_path, "qwen3"), P(), dtype)


class Case(NamedTuple):
    """A run: how many processes, on which backend, in which layout."""

    processes: int
    parallel: ParallelConfig = P()
    backend: str = "fsdp"
    optimizer: OptimizerConfig = OPTIMIZER
    dtype: str = "float32"


def policy_with_average(folder: Path, case: Case) -> Any:
    config = config_of(
        folder, case.parallel, case.optimizer, dtype=case.dtype, backend=case.backend
    )
    config.algorithm.ema_beta = 0.5
    return built_backend(config).policy(config), config


def losses_of(actor: Any, steps: int) -> list[float]:
    rows = given(rows_of(TOKENS))
    return [actor.step(rows, cross_entropy_loss())["loss"] for _ in range(steps)]


def save_body(world: Any, model: Path, kept: Path, case: Case) -> list[float]:
    actor, config = policy_with_average(model, case)
    losses_of(actor, 3)
    checkpoints = TrainingCheckpoints(kept, {"policy": actor}, config)
    checkpoints.save({}, step=3)
    losses = losses_of(actor, 5)
    checkpoints.wait()
    return losses


def resume_body(world: Any, model: Path, kept: Path, again: Path, case: Case) -> list[float]:
    actor, config = policy_with_average(model, case)
    assert TrainingCheckpoints(kept, {"policy": actor}, config).resume() is not None
    # what was taken back, for a comparison of all its bits
    TrainingCheckpoints(again, {"policy": actor}, config).save({}, step=3)
    return losses_of(actor, 5)


def resumed(
    folder: Path, variant: str, saved: Case, others: list[Case]
) -> tuple[list[float], list[list[float]]]:
    """(losses after a save, those of each resume); all that was saved came back."""
    save = save_tiny_vision if variant in KINDS else save_tiny
    model, kept = save(folder / "model", variant), folder / "kept"
    (expected, *_) = run_ranks(saved.processes, save_body, model, kept, saved)
    whole, found = tensors(kept / "step_000003"), []
    for number, case in enumerate(others):
        again = folder / f"again{number}"
        (losses, *_) = run_ranks(case.processes, resume_body, model, kept, again, case)
        back = tensors(again / "step_000003")
        assert back.keys() == whole.keys()
        odd = [key for key, tensor in whole.items() if not torch.equal(tensor, back[key])]
        assert not odd, odd
        found.append(losses)
    assert len(set(expected)) == 5
    return expected, found


FEW = [Case(3), Case(2, P(replicas=2, cpu_offload=True))]
MANY = [Case(2), Case(1), Case(4, P(replicas=2, tensor=2)), Case(3, P(cpu_offload=True))]


@pytest.mark.parametrize(
    ("dtype", "variant", "kinds"),
    [
        ("bfloat16", "qwen3", FEW),
        pytest.param("float32", "qwen2-tied", MANY, marks=pytest.mark.ranks),
        pytest.param("bfloat16", "qwen3", MANY, marks=pytest.mark.ranks),
        pytest.param("float32", "qwen3-moe", MANY, marks=pytest.mark.ranks),
    ],
)
def test_a_run_goes_on_bit_for_bit_and_at_another_world_size(
    dtype: str, variant: str, kinds: list[Case], tmp_path: Path
) -> None:
    cases = [case._replace(dtype=dtype) for case in kinds]
    expected, (same, *others) = resumed(tmp_path, variant, cases[0], cases)
    assert same == expected
    for found in others:
        assert found == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 0.02)


MEGATRON = {
    "qwen3": Case(4, P(tensor=4), "megatron"),  # more processes than key-value heads
    "qwen2-tied": Case(4, P(pipeline=2), "megatron", SHARDED),
    "qwen3-moe": Case(4, P(tensor=2, sequence=True, expert=2), "megatron", SHARDED),
}


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        pytest.param(variant, dtype, marks=pytest.mark.ranks)
        for variant in ("qwen3-moe", "qwen3", "qwen2-tied")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_a_run_of_one_backend_goes_on_under_the_other(
    variant: str, dtype: str, tmp_path: Path
) -> None:
    megatron = MEGATRON[variant]._replace(dtype=dtype)
    sharing = variant == "qwen3-moe"
    fsdp = Case(4, P(tensor=2), dtype=dtype) if sharing else Case(2, dtype=dtype)
    for name, saved, other in (("from", megatron, fsdp), ("to", fsdp, megatron)):
        expected, (found,) = resumed(tmp_path / name, variant, saved, [other])
        assert found == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 0.05)


def export_body(world: Any, folder: Path, target: Path) -> int:
    actor = build_policy(folder, P(), backend="fsdp")
    return most_bytes(lambda: export(actor, target, TrainerConfig(push_bucket_mib=1)))


def test_an_export_is_a_stream_of_buckets_however_large_the_model_is(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
    folder, target = save_tiny(tmp_path / "model", "qwen3", **wide), tmp_path / "target"
    found = run_ranks(2, export_body, folder, target)
    files = target.glob("*.safetensors")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(folder / "model.safetensors")
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in whole.items())
    # Of 57 MB: a bucket's tensors, what is sent of them and what comes; gloo lets go of them late.
    assert max(found) < sum(tensor.nbytes for tensor in whole.values()) / 3


@pytest.mark.ranks
def test_a_run_of_a_model_that_sees_goes_on_under_the_other_backend(tmp_path: Path) -> None:
    slow = replace(OPTIMIZER, learning_rate=1e-4)  # at more its loss is 0 soon
    megatron = Case(2, P(tensor=2, sequence=True), "megatron", slow)
    for name, saved, other in (
        ("from", megatron, Case(2, optimizer=slow)),
        ("to", Case(2, P(tensor=2), optimizer=slow), megatron),
    ):
        expected, (found,) = resumed(tmp_path / name, "qwen2_5_vl", saved, [other])
        assert min(expected) > 0.1
        assert found == pytest.approx(expected, rel=1e-5)


def names_body(world: Any, model: Path, kept: Path) -> None:
    """The names that users of other systems call."""
    actor = build_policy(model, P(), OPTIMIZER, backend="fsdp")
    losses_of(actor, 2)
    manager = actor.manager
    for number, weight in enumerate(manager.trained):
        weight.parameter.grad = torch.full_like(weight.parameter, number + 0.5)
    full = actor.residency.bytes()
    assert full["gradients"] > 0
    manager.offload_param_and_grad(offload_grad=True)
    manager.offload_optimizer()
    assert set(actor.residency.bytes().values()) == {0}
    manager.load_param_and_grad(load_grad=True)
    manager.load_optimizer()
    assert actor.residency.bytes() == full
    for number, weight in enumerate(manager.trained):
        assert (local(weight.parameter.grad) == number + 0.5).all()
    manager.zero_grad()
    actor.save_checkpoint(kept, step=2)
    expected = losses_of(actor, 2)
    actor.load_checkpoint(kept)
    assert losses_of(actor, 2) == expected
    with pytest.raises(CheckpointError, match="holds no checkpoint of a run"):
        actor.load_checkpoint(model)


def test_offload_and_checkpoints_are_there_under_the_names_of_others(tmp_path: Path) -> None:
    run_ranks(2, names_body, save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept")


def built_body(world: Any, folder: Path, parallel: ParallelConfig) -> None:
    build_policy(folder, parallel, OPTIMIZER, backend="fsdp")


def test_an_output_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_decoder(tmp_path, "qwen3-tied")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankFailure, match="is not the embedding, though tie_word_embeddings=true"):
        run_ranks(2, built_body, folder, replace(P(), replicas=1))
