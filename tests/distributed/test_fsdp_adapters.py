"""Adapters on FSDP2 learn as in plain torch and as on Megatron in every layout, and nothing else
learns.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.checkpoints.training_files import TrainingReader
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.config.options.adapters import OF_ATTENTION
from rftmega.core.errors import CheckpointError, NothingTrained
from rftmega.models.hf.peft_folder import names_of_pairs
from rftmega.models.lora import linear
from rftmega.run.placement.export import export
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.states import states
from rftmega.runtime.device.residency import ADAM, GRADIENTS, PARAMETERS, PARTS
from rftmega.trainer.experience import given
from rftmega.weights import EngineWeights
from tests import plain_adapters
from tests.block_engine import BlockEngine
from tests.distributed.test_adapters import (
    ALPHA,
    MERGED,
    OF_VOCABULARY,
    RANK,
    ROWS,
    STEPS,
    WITH_VOCABULARY,
    assert_drops,
    beside,
    whole,
)
from tests.layouts import build_policy, rows_of
from tests.plain_loop import log_probs
from tests.ranks import run_ranks
from tests.tiny_decoders import save_decoder
from tests.tiny_models import save_tiny

P = ParallelConfig
TOLERANCE = 1e-5
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, clip_grad=0.5)
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "FSDP 1": (1, P()),
    "FSDP 2": (2, P()),
    "FSDP 2, full recompute": (2, P(recompute="full")),
    "FSDP 1 x TP2": (2, P(tensor=2)),
    "2 replicas": (2, P(replicas=2)),
    "FSDP 2, ZeRO-2": (2, P(reshard_after_forward=False)),
    "FSDP 2, on the host": (2, P(cpu_offload=True)),
    "FSDP 3": (3, P()),  # blocks of 2, 2 and 0 rows of A
    "FSDP 2 x TP2": (4, P(tensor=2)),
    "FSDP 2 x TP2, full recompute": (4, P(tensor=2, recompute="full")),
    "2 replicas x 2": (4, P(replicas=2)),
    "2 replicas x TP2": (4, P(replicas=2, tensor=2)),
}
QUICK = ("FSDP 1 x TP2",)
DTYPES = [pytest.param("float32", marks=pytest.mark.ranks), "bfloat16"]


def policy_of(
    folder: Path,
    parallel: ParallelConfig,
    adapter: Path | str = "",
    targets: tuple[str, ...] = (),
    *,
    backend: str = "fsdp",
    rank: int = RANK,
    dropout: float = 0.0,
    **settings: Any,
) -> Any:
    lora = LoRA(rank=rank, alpha=ALPHA, targets=list(targets), path=str(adapter), dropout=dropout)
    return build_policy(folder, parallel, OPTIMIZER, lora=lora, backend=backend, **settings)


def learn(actor: Any, steps: int) -> list[tuple[float, float]]:
    found = [actor.step(given(rows_of(ROWS)), cross_entropy_loss()) for _ in range(steps)]
    return [(metrics["loss"], metrics["grad_norm"]) for metrics in found]


def learn_body(
    world: Any, folder: Path, adapter: Path, parallel: ParallelConfig, *more: Any
) -> Any:
    actor = policy_of(folder, parallel, adapter, *more)
    told = learn(actor, STEPS)
    actor.residency.finish()
    return told, whole(actor.adapters().shards, actor)


def assert_learns_as_plain_torch(
    tmp_path: Path,
    variant: str,
    processes: int,
    parallel: ParallelConfig,
    targets: tuple[str, ...] = (),
) -> None:
    save = save_decoder if variant in ("qwen3-next", "phi") else save_tiny
    folder = save(tmp_path / "model", variant)
    every = (*plain_adapters.ALL, *plain_adapters.MIXTRAL.values())
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=targets or every)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    model = plain_adapters.adapted(folder, pairs, alpha=ALPHA)
    wanted = plain_adapters.learn(model, ROWS, OPTIMIZER, steps=STEPS)
    assert wanted[-1][0] < wanted[0][0] - 0.05, "nothing was learnt, so nothing was compared"
    for told, found in run_ranks(processes, learn_body, folder, adapter, parallel, targets):
        for ours, theirs in zip(told, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)
        plain_adapters.assert_pairs(found, model, pairs)


@pytest.mark.parametrize("name", beside(sorted(LAYOUTS.keys() - {"FSDP 2 x TP2"}), QUICK))
def test_three_steps_of_adapters_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", *LAYOUTS[name])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variant", "targets", "name"),
    [
        # one HF tensor each, whose columns are put together again
        ("phi3", ("qkv_proj", "gate_up_proj"), "FSDP 2 x TP2, full recompute"),
        ("qwen2", ("k_proj", "o_proj"), "FSDP 1 x TP2"),  # biases
        ("qwen2-tied", (), "FSDP 2 x TP2, full recompute"),
        ("olmo2", (), "FSDP 1 x TP2"),  # norms of all heads
        ("qwen3-moe", OF_ATTENTION[:4], "FSDP 1 x TP2"),
        ("qwen3-next", OF_ATTENTION[:4], "FSDP 2, full recompute"),  # rows are padded
        ("phi", ("lm_head", "dense", "q_proj"), "FSDP 1 x TP2"),  # a head with a bias
    ],
)
def test_adapters_on_some_layers_of_other_models_learn_as_in_plain_torch(
    variant: str, targets: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, *LAYOUTS[name], targets)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param("FSDP 1", WITH_VOCABULARY, marks=pytest.mark.ranks),
        # by themselves
        pytest.param("FSDP 2", OF_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("FSDP 2, full recompute", WITH_VOCABULARY, marks=pytest.mark.ranks),
        ("FSDP 1 x TP2", WITH_VOCABULARY),
        pytest.param("FSDP 2, full recompute", ("v_proj", "embed_tokens"), marks=pytest.mark.ranks),
        pytest.param("FSDP 2", ("lm_head",), marks=pytest.mark.ranks),
        pytest.param("FSDP 2, ZeRO-2", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("FSDP 2, on the host", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("FSDP 3", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("2 replicas", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("FSDP 2 x TP2", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("FSDP 2 x TP2, full recompute", OF_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("2 replicas x TP2", WITH_VOCABULARY, marks=pytest.mark.ranks),
    ],
)
def test_three_steps_of_adapters_on_embedding_and_head_are_those_of_plain_torch(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", *LAYOUTS[name], targets)


MIXED = (  # variant and layout
    pytest.param("qwen3-moe", "FSDP 2, full recompute", marks=pytest.mark.ranks),
    ("qwen3-moe", "FSDP 1 x TP2"),
)
MANY_MIXED = (
    ("qwen3-moe", "FSDP 1"),
    ("qwen3-moe", "FSDP 2, ZeRO-2"),
    ("qwen3-moe", "FSDP 3"),  # blocks of 2, 2 and 0 experts
    ("qwen3-moe", "2 replicas x TP2"),
    ("qwen3-moe", "FSDP 2, on the host"),
    ("qwen3-moe", "FSDP 2 x TP2, full recompute"),
    ("mixtral", "FSDP 2 x TP2, full recompute"),  # w1, w3, w2
    ("qwen2-moe", "FSDP 1 x TP2"),  # a shared expert
)


@pytest.mark.parametrize(("variant", "name"), MIXED)
def test_three_steps_of_adapters_on_experts_are_those_of_plain_torch(
    variant: str, name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, *LAYOUTS[name])


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "name"), MANY_MIXED)
def test_adapters_on_experts_learn_as_in_plain_torch_in_other_layouts(
    variant: str, name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, *LAYOUTS[name])


def fresh_body(
    world: Any, folder: Path, parallel: ParallelConfig, backend: str, targets: tuple[str, ...]
) -> Any:
    actor = policy_of(folder, parallel, targets=targets, backend=backend)
    rows = rows_of(ROWS)
    before, matrices = actor.log_probs(rows).logp, trained_of(actor)
    with actor.manager.adapters.swapped_in():
        assert torch.equal(actor.log_probs(rows).logp, before)
    return matrices, learn(actor, STEPS), trained_of(actor)


def trained_of(actor: Any) -> dict[str, torch.Tensor]:
    """The matrices of all pairs; without those that Megatron has of layers without a pair."""
    actor.residency.finish()
    found = whole(actor.adapters().shards, actor)
    return {name: found[name] for name in sorted(names_of_pairs(found))}


@pytest.mark.parametrize(
    ("variant", "name", "targets"),
    [
        pytest.param("qwen3", "FSDP 2", MERGED, marks=pytest.mark.ranks),
        pytest.param("qwen3", "FSDP 2 x TP2, full recompute", MERGED, marks=pytest.mark.ranks),
        ("qwen3", "FSDP 1 x TP2", WITH_VOCABULARY),
        # half of what stands in a tensor
        pytest.param("qwen3-moe", "FSDP 2", ("q_proj", "up_proj"), marks=pytest.mark.ranks),
        pytest.param("mixtral", "FSDP 1 x TP2", ("w2", "w3"), marks=pytest.mark.ranks),
    ],
)
def test_adapters_begin_and_learn_as_under_megatron(
    variant: str, name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    (wanted,) = run_ranks(1, fresh_body, folder, P(), "megatron", targets)
    processes, parallel = LAYOUTS[name]
    for matrices, told, trained in run_ranks(
        processes, fresh_body, folder, parallel, "fsdp", targets
    ):
        assert matrices.keys() == wanted[0].keys()
        assert all(torch.equal(matrices[each], wanted[0][each]) for each in matrices)
        for ours, theirs in zip(told, wanted[1], strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)
        for each, tensor in trained.items():
            torch.testing.assert_close(tensor, wanted[2][each], atol=2e-5, rtol=1e-4)
            assert not torch.equal(tensor, matrices[each]), f"{each} learnt nothing"


def reference_body(
    world: Any, folder: Path, adapter: Path, parallel: ParallelConfig, targets: tuple[str, ...]
) -> Any:
    actor = policy_of(folder, parallel, adapter, targets, keep_reference=True, dropout=0.1)
    rows = rows_of(ROWS)
    learn(actor, 1)
    on = actor.log_probs(rows).logp
    off = actor.reference_log_probs(rows).logp
    assert torch.equal(actor.log_probs(rows).logp, on), "the adapters are not on again"
    plain = policy_of(folder, parallel, rank=0)
    return on, off, plain.log_probs(rows).logp


@pytest.mark.parametrize(
    ("variant", "name", "targets"),
    [
        pytest.param("qwen3", "FSDP 2, ZeRO-2", (), marks=pytest.mark.ranks),
        pytest.param("qwen3", "FSDP 1 x TP2", (), marks=pytest.mark.ranks),
        ("qwen3", "FSDP 1 x TP2", OF_VOCABULARY),
        pytest.param("qwen3-moe", "FSDP 2, ZeRO-2", (), marks=pytest.mark.ranks),
    ],
)
def test_the_reference_is_the_policy_with_its_adapters_off(
    variant: str, name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", variant)
    every = targets or plain_adapters.ALL
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=every)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    processes, parallel = LAYOUTS[name]
    for on, off, plain in run_ranks(processes, reference_body, folder, adapter, parallel, targets):
        assert torch.equal(off, plain)
        assert (on - off).abs().max() > 0.05


def memory_body(
    world: Any, folder: Path, parallel: ParallelConfig, dtype: str, targets: tuple[str, ...]
) -> Any:
    """(elements that learn here, all others, bytes by part, kinds of a checkpoint's tensors)"""
    actor = policy_of(folder, parallel, dtype=dtype, targets=targets)
    learn(actor, 2)  # in the first one B is 0, and so is the gradient of A
    actor.residency.finish()
    kept = {box.key for box in actor.training_tensors()}
    assert all(".lora_" in key for key in kept), kept
    manager = actor.manager
    for state in manager.optimizer.state.values():
        assert not state["exp_avg"].numel() or state["exp_avg_sq"].any(), "one had no gradient"
    assert {weight.rows.dtype for weight in manager.trained} == {torch.float32}
    assert {weight.rows.dtype for weight in manager.weights_held} == {actor.dtype}
    trained, held = (
        sum(weight.rows.numel() for weight in weights)
        for weights in (manager.trained, manager.weights_held)
    )
    found, planned = actor.residency.bytes(), models_of(manager.cfg)[POLICY]
    # between two steps nothing has a gradient; the memory of short blocks is as that of others
    assert found == states(planned, world.size, 0) | {GRADIENTS: 0}, "it was foretold otherwise"
    return trained, held, found, {key.split("/")[0] for key in kept}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("variant", "name", "targets"),
    [
        pytest.param("qwen3", "FSDP 2, full recompute", (), marks=pytest.mark.ranks),
        ("qwen3", "FSDP 2, full recompute", WITH_VOCABULARY),
        pytest.param("qwen3", "FSDP 2 x TP2, full recompute", (), marks=pytest.mark.ranks),
        pytest.param("qwen3", "FSDP 2 x TP2", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("qwen3-moe", "FSDP 2 x TP2, full recompute", (), marks=pytest.mark.ranks),
    ],
)
def test_only_adapters_have_main_parameters_gradients_and_an_optimizers_state(
    variant: str, name: str, targets: tuple[str, ...], dtype: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant, vocab_size=132)  # of which no block is short
    processes, parallel = LAYOUTS[name]
    size, narrow = (4, 0) if dtype == "float32" else (2, 2)
    found = run_ranks(processes, memory_body, folder, parallel, dtype, targets)
    for trained, held, bytes_of, kinds in found:
        assert 0 < trained < held / 3
        # those of the frozen model, of what learns, and of every A once more
        assert 0 < bytes_of[PARAMETERS] - size * held - (4 + narrow) * trained < size * held / 4
        assert bytes_of[ADAM] == 8 * trained
        main = {"main"} if narrow else set()
        assert kinds == {"weights", "exp_avg", "exp_avg_sq", *main}


def zero_body(world: Any, folder: Path) -> str:
    actor = policy_of(folder, P())
    learn(actor, 1)
    step = actor.step(given(rows_of(ROWS)), policy_loss())  # nothing pulls: all advantages are 0
    assert step["grad_norm"] == 0 and not step["empty_steps"]
    linear.LinearWithPair.with_product = (  # type: ignore[method-assign]
        lambda self, x, completion: completion + 0 * self.lora_B(self.lora_A(x))
    )
    with pytest.raises(NothingTrained) as raised:
        learn(policy_of(folder, P(recompute="full")), 1)
    return str(raised.value)


def test_a_gradient_that_is_lost_is_refused(tmp_path: Path) -> None:
    for lost in run_ranks(2, zero_body, save_tiny(tmp_path, "qwen3")):
        assert "no gradient reaches the adapters" in lost


def dropout_body(
    world: Any, folder: Path, adapter: Path, layouts: Sequence[ParallelConfig]
) -> list[Any]:
    """Of each layout."""
    return [dropped(folder, adapter, parallel) for parallel in layouts]


def dropped(folder: Path, adapter: Path, parallel: ParallelConfig) -> Any:
    found = []
    for share in (0.0, 0.5):
        actor = policy_of(folder, parallel, adapter, dropout=share)
        usual = torch.random.get_rng_state()
        with actor.manager.before_micro_batch(actor.manager.network, True):
            drawn = torch.rand(4)
        scored, told = actor.log_probs(rows_of(ROWS)).logp, learn(actor, 2)
        partial = [weight for weight in actor.manager.trained if weight.partial]
        plans = [plan for weight in partial for plan in weight.plans]
        names = [name for plan in plans for name in plan.logical.names]
        trained = trained_of(actor)
        found.append((scored, told, {name: trained[name] for name in names}))
    assert torch.equal(torch.random.get_rng_state(), usual), "the usual stream was drawn from"
    return found, drawn


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_adapters_drop_while_learning_alone_and_the_same_where_rows_are_the_same(
    variant: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", variant)
    pairs = plain_adapters.random_pairs(folder, rank=RANK)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    layouts = (P(tensor=2), P(tensor=2, recompute="full"), P())
    *same, others = zip(*run_ranks(2, dropout_body, folder, adapter, layouts), strict=True)
    for ranks in same:
        assert_drops([found for found, _ in ranks])
        assert torch.equal(ranks[0][1], ranks[1][1])
    told, again = ([losses for _, losses, _ in ranks[0][0]] for ranks in same)
    # what is computed again drops the same
    assert again[1] == [pytest.approx(pair, rel=TOLERANCE) for pair in told[1]]
    one, other = (drawn for _, drawn in others)
    assert not torch.equal(one, other), "other rows drop the same"


def kept_by(actor: Any, folder: Path) -> TrainingCheckpoints:
    return TrainingCheckpoints(folder, {"policy": actor}, actor.manager.cfg)


class Case(NamedTuple):
    processes: int
    parallel: ParallelConfig = P()
    backend: str = "fsdp"
    dtype: str = "float32"
    dropout: float = 0.1
    targets: tuple[str, ...] = MERGED


def policy_in(model: Path, case: Case, rank: int = RANK) -> Any:
    return policy_of(
        model,
        case.parallel,
        targets=case.targets if rank else (),
        backend=case.backend,
        dtype=case.dtype,
        rank=rank,
        dropout=case.dropout if rank else 0.0,
    )


def save_body(world: Any, model: Path, folder: Path, case: Case) -> list[tuple[float, float]]:
    actor = policy_in(model, case)
    learn(actor, 2)
    checkpoints = kept_by(actor, folder)
    checkpoints.save({}, step=2)
    told = learn(actor, 3)
    checkpoints.wait()
    return told


def resume_body(
    world: Any, model: Path, folder: Path, case: Case, rank: int = RANK
) -> list[tuple[float, float]] | str:
    actor = policy_in(model, case, rank)
    actor.residency.only()  # as a colocated run holds it when it resumes
    try:
        assert kept_by(actor, folder).load(folder / "step_000002") == {}
    except CheckpointError as raised:
        return str(raised)
    actor.residency.finish()
    actor.residency.on(*PARTS)
    if rank and case.backend == "fsdp":
        for weight, gathered in actor.manager.adapters._gathered:
            first, rows = actor.manager.placement.first_row(len(gathered)), weight.pushed
            assert torch.equal(gathered[first : first + len(rows)], rows), weight.name
    return learn(actor, 3)


def refused_body(
    world: Any, folder: Path, tried: Sequence[tuple[Path, int]]
) -> list[list[tuple[float, float]] | str]:
    case = Case(2, P(tensor=2))
    return [resume_body(world, model, folder, case, rank) for model, rank in tried]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_of_adapters_goes_on_bit_for_bit_from_a_checkpoint_that_holds_no_other_weights(
    dtype: str, tmp_path: Path
) -> None:
    model, folder = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept"
    case = Case(2, dtype=dtype)
    expected, *_ = run_ranks(2, save_body, model, folder, case)
    reader = TrainingReader(folder / "step_000002")
    assert all(".lora_" in key for key in reader.stored)
    for found in run_ranks(2, resume_body, model, folder, case):
        assert found == expected


SAVED = (Case(2, dropout=0.0), Case(1, backend="megatron", dropout=0.0))
FEW_READERS = (
    (
        Case(2, P(tensor=2), dropout=0.0),
        Case(2, P(tensor=2, sequence=True), backend="megatron", dropout=0.0),
    ),
    (Case(1, dropout=0.0),),
)
MANY_READERS = (
    (
        Case(4, P(tensor=2), dropout=0.0),
        Case(1, dropout=0.0),
        Case(2, P(tensor=2, sequence=True), backend="megatron", dropout=0.0),
        Case(2, backend="megatron", dropout=0.0),
    ),
) * 2


@pytest.mark.parametrize(
    ("variant", "targets", "readers"),
    [
        pytest.param("qwen3", MERGED, FEW_READERS, marks=pytest.mark.ranks),
        pytest.param("qwen3", MERGED, MANY_READERS, marks=pytest.mark.ranks),
        pytest.param("qwen3", WITH_VOCABULARY, MANY_READERS, marks=pytest.mark.ranks),
        pytest.param("qwen3-moe", MERGED, MANY_READERS, marks=pytest.mark.ranks),
    ],
)
def test_a_checkpoint_of_adapters_is_read_in_another_layout_and_under_the_other_backend(
    variant: str,
    targets: tuple[str, ...],
    readers: tuple[tuple[Case, ...], ...],
    tmp_path: Path,
) -> None:
    model = save_tiny(tmp_path / "model", variant)
    for saved, others in zip(SAVED, readers, strict=True):
        folder, saved = tmp_path / saved.backend, saved._replace(targets=targets)
        expected, *_ = run_ranks(saved.processes, save_body, model, folder, saved)
        for other in others:
            other = other._replace(targets=targets)
            found, *_ = run_ranks(other.processes, resume_body, model, folder, other)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("saved", "other"),
    [("fsdp", "megatron"), pytest.param("megatron", "fsdp", marks=pytest.mark.ranks)],
)
def test_random_streams_of_one_backend_are_not_taken_by_the_other(
    saved: str, other: str, tmp_path: Path
) -> None:
    model, folder = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept"
    run_ranks(1, save_body, model, folder, Case(1, backend=saved))
    (told,) = run_ranks(1, resume_body, model, folder, Case(1, backend=other))
    assert len(told) == 3


def test_adapters_of_another_rank_or_on_other_weights_are_not_resumed(tmp_path: Path) -> None:
    model, folder = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept"
    run_ranks(1, save_body, model, folder, Case(1))
    strange = save_tiny(tmp_path / "strange", "qwen3", seed=1)
    tried = ((model, 2 * RANK), (model, 0), (strange, RANK))
    for other, none, elsewhere in run_ranks(2, refused_body, folder, tried):
        assert "rank=4" in other and "rank=8" in other
        assert "this run with no adapters" in none
        assert "belong to other weights" in elsewhere


def merge_body(
    world: Any,
    folder: Path,
    adapter: Path,
    parallel: ParallelConfig,
    target: Path,
    dtype: str,
    targets: tuple[str, ...],
) -> torch.Tensor:
    """Log-probs of ROWS that were exported to `target`."""
    actor = policy_of(folder, parallel, adapter, targets, dtype=dtype, ema_beta=0.5)
    trainer, kind = actor.manager.cfg.trainer, getattr(torch, dtype)
    frozen = [weight.rows.clone() for weight in actor.manager.weights_held]
    learn(actor, 2)
    actor.residency.off(*PARTS)
    actor.residency.on(*PARTS)
    actor.residency.finish()
    export(actor, target, trainer)
    logp: torch.Tensor = actor.log_probs(rows_of(ROWS)).logp
    size = 2 if world.size % 2 == 0 else 1
    engine = BlockEngine(world.rank % size, size)
    pushed = EngineWeights(actor.shards(), engine, bucket_bytes=30_000)
    for version in range(2):
        by_hand = plain_adapters.merged_by_hand(folder, Path(f"{target}_adapter"), dtype=kind)
        actor.residency.finish()  # the average was exported in between
        pushed.push(version=version)
        for name, tensor in by_hand.items():
            wanted = engine.block(name, tensor)
            torch.testing.assert_close(
                engine.loaded[name].double(), wanted, atol=1e-6, rtol=rounded(kind)
            )
        assert all(each.held == each.sent == each.received for each in pushed.checksums())
        learn(actor, 1)
        actor.residency.finish()
        target = Path(f"{target}_{version}")
        export(actor, target, trainer)
    for before, weight in zip(frozen, actor.manager.weights_held, strict=True):
        assert torch.equal(before, weight.rows), "the frozen weights changed"
    return logp


def rounded(kind: torch.dtype) -> float:
    return 1e-5 if kind == torch.float32 else 2.0**-8


@pytest.mark.parametrize(
    ("name", "dtype", "variant", "targets"),
    [
        pytest.param("FSDP 3", "float32", "qwen3", MERGED, marks=pytest.mark.ranks),
        pytest.param(
            *("FSDP 2 x TP2, full recompute", "bfloat16", "qwen3", MERGED),
            marks=pytest.mark.ranks,
        ),
        pytest.param("FSDP 2, on the host", "float32", "qwen3", MERGED, marks=pytest.mark.ranks),
        pytest.param("2 replicas x TP2", "float32", "qwen3", MERGED, marks=pytest.mark.ranks),
        ("FSDP 2", "float32", "qwen3-moe", MERGED),  # of gate and up, in one tensor, up alone
        ("FSDP 3", "float32", "qwen3", WITH_VOCABULARY),
        pytest.param("FSDP 2 x TP2", "float32", "qwen3", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("FSDP 2", "bfloat16", "qwen3", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("FSDP 2 x TP2", "bfloat16", "qwen3-moe", MERGED, marks=pytest.mark.ranks),
        pytest.param("FSDP 3", "float32", "qwen3-moe", MERGED, marks=pytest.mark.ranks),
        ("FSDP 1 x TP2", "bfloat16", "qwen3", MERGED),
    ],
)
def test_what_is_exported_and_pushed_is_the_base_and_the_product_of_its_pair(
    name: str, dtype: str, variant: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder, target = save_tiny(tmp_path / "model", variant), tmp_path / "out"
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=targets)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    processes, parallel = LAYOUTS[name]
    logp, *_ = run_ranks(processes, merge_body, folder, adapter, parallel, target, dtype, targets)
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        with torch.no_grad():
            wanted = log_probs(model, ROWS)
        for row, said in zip(logp, wanted, strict=True):
            torch.testing.assert_close(row[: len(said)], said, atol=1e-5, rtol=0)
    base, kind = load_file(folder / "model.safetensors"), getattr(torch, dtype)
    for out in (target, Path(f"{target}_ema")):
        (file,) = out.glob("*.safetensors")
        merged = load_file(file)
        by_hand = plain_adapters.merged_by_hand(folder, Path(f"{out}_adapter"), dtype=kind)
        assert merged.keys() == by_hand.keys()
        for each, tensor in by_hand.items():
            torch.testing.assert_close(merged[each].double(), tensor, atol=1e-6, rtol=rounded(kind))
            changed = each.split(".")[-2] in targets
            assert torch.equal(merged[each], base[each].to(kind)) != changed, each
        written = load_file(Path(f"{out}_adapter") / "adapter_model.safetensors")
        named = map(plain_adapters.names_of, pairs)
        of_pairs = {plain_adapters.PREFIX + each for both in named for each in both}
        assert written.keys() == of_pairs
