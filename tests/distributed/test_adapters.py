"""Adapters learn as in plain torch under every layout, and nothing else learns."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.backends.megatron import MegatronActor, adapters
from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.checkpoints.training_files import TrainingReader
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.core.errors import CheckpointError, NothingTrained
from rftmega.run.placement.export import export
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.states import states
from rftmega.runtime.device.residency import ADAM, GRADIENTS, PARAMETERS, PARTS
from rftmega.runtime.parallel.topology import Topology
from rftmega.trainer.experience import given
from rftmega.weights import EngineWeights, Exporter
from tests import plain_adapters
from tests.block_engine import BlockEngine
from tests.layouts import config_of, packed_logits, rows_of
from tests.ranks import LOCAL, run_ranks
from tests.tiny_models import save_tiny
from tests.unit.models.kernels.test_packed_weights import rounded

P = ParallelConfig
RANK, ALPHA, STEPS = 4, 6.0, 3
TOLERANCE = 1e-5
ROWS = [
    [(37 * i + 11 * b) % 131 for i in range(n)] for b, n in enumerate((30, 2, 17, 5, 26, 9, 3, 21))
]
PLAIN = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, clip_grad=0.5)
SHARDED = replace(PLAIN, distributed=True)
OVERLAPPED = replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True)
Case = tuple[int, ParallelConfig, OptimizerConfig]
LAYOUTS: dict[str, Case] = {
    "TP1": (1, P(), PLAIN),
    "TP2": (2, P(tensor=2), PLAIN),
    "TP2, SP": (2, P(tensor=2, sequence=True), PLAIN),
    "PP2": (2, P(pipeline=2), PLAIN),
    "PP2 x VPP2": (2, P(pipeline=2, virtual_pipeline=2), SHARDED),
    "CP2": (2, P(context=2), PLAIN),
    "DP2, distributed optimizer": (2, P(), SHARDED),
    "full recompute": (1, P(recompute="full"), PLAIN),
    # behind a frozen embedding the first stage alone would lose its gradients
    "PP2, full recompute": (2, P(pipeline=2, recompute="full"), PLAIN),
    "TP2, distributed optimizer": (2, P(tensor=2), SHARDED),
    "DP2, overlapped": (2, P(), OVERLAPPED),
    "TP4 (2 key-value heads)": (4, P(tensor=4), SHARDED),
    "TP2 x PP2": (4, P(tensor=2, pipeline=2), PLAIN),
    "TP2 x PP2, SP, full recompute": (4, P(tensor=2, pipeline=2, sequence=True, recompute="full"), SHARDED),
    "TP2 x CP2, SP, selective recompute": (4, P(tensor=2, context=2, sequence=True, recompute="selective"), SHARDED),
    "PP2 x VPP2 x DP2, overlapped": (4, P(pipeline=2, virtual_pipeline=2), OVERLAPPED),
    "EP2": (2, P(expert=2), SHARDED),
}  # fmt: skip
# of embedding and head, beside some layers, and by themselves: then a difference in one step is ten
# times as large in the next
OF_VOCABULARY = ("embed_tokens", "lm_head")
WITH_VOCABULARY = ("q_proj", "down_proj", *OF_VOCABULARY)
IN_MEGATRON_S_NAMES = {
    "linear_proj": "o_proj",
    "word_embeddings": "embed_tokens",
    "output_layer": "lm_head",
}
MIXED: dict[str, Case] = {
    "one process": (1, P(), PLAIN),
    "EP2": (2, P(expert=2), PLAIN),
    "TP2 (whole experts)": (2, P(tensor=2, sequence=True), PLAIN),
    "TP2, split experts": (2, P(tensor=2, sequence=True, expert_tensor=2), PLAIN),
    "EP2 x TP2 (one process an expert)": (2, P(tensor=2, sequence=True, expert=2), PLAIN),
    "PP2": (2, P(pipeline=2), PLAIN),
    "split experts, distributed optimizer": (2, P(expert_tensor=2), SHARDED),
    "EP2, full recompute": (2, P(expert=2, recompute="full"), SHARDED),
    "EP2 x CP2": (2, P(expert=2, context=2), PLAIN),
    "DP2, overlapped": (2, P(), OVERLAPPED),
    "EP2 x TP2, split experts": (4, P(tensor=2, sequence=True, expert=2, expert_tensor=2), PLAIN),
    "EP2 x TP2 x DP2, overlapped": (4, P(tensor=2, sequence=True, expert=2), OVERLAPPED),
    "PP2 x VPP2, split experts": (4, P(pipeline=2, virtual_pipeline=2, expert_tensor=2), SHARDED),
    "EP2 x PP2, recompute": (4, P(pipeline=2, expert=2, recompute="selective"), SHARDED),
}  # fmt: skip
QUICK_MIXED = ("EP2", "TP2, split experts")
FEW = list(MIXED)[:10]
MANY = list(MIXED)[10:]
QUICK = ("TP2, SP", "PP2, full recompute")
FIRST = list(LAYOUTS)[:9]
EXHAUSTIVE = list(LAYOUTS)[9:-1]


def actor_of(
    folder: Path, adapter: Path | str, case: Case, targets: tuple[str, ...] = (), **settings: Any
) -> MegatronActor:
    lora = LoRA(rank=RANK, alpha=ALPHA, targets=list(targets), path=str(adapter))
    config = config_of(folder, case[1], case[2], lora=lora, **settings)
    return MegatronActor(config, Topology.create(case[1], seed=1))


def learn(actor: MegatronActor, steps: int) -> list[tuple[float, float]]:
    found = []
    for _ in range(steps):
        metrics = actor.step(given(rows_of(ROWS)), cross_entropy_loss())
        found.append((metrics["loss"], metrics["grad_norm"]))
    return found


def whole(shards: Any, actor: MegatronActor) -> dict[str, torch.Tensor]:
    exporter = Exporter(list(shards), actor.replica_group, bucket_bytes=2**20)
    return {name: tensor.clone() for name, tensor in exporter}


def learn_body(
    world: Any, folder: Path, adapter: Path, case: Case, targets: tuple[str, ...]
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    actor = actor_of(folder, adapter, case, targets)
    told = learn(actor, STEPS)
    actor.manager.finish_param_sync()
    held = actor.adapters()
    assert held is not None
    return told, whole(held.shards, actor)


def assert_learns_as_plain_torch(
    tmp_path: Path,
    variant: str,
    case: Case,
    targets: tuple[str, ...] = (),
    *,
    preloaded: str = LOCAL,
) -> None:
    folder = save_tiny(tmp_path / "model", variant)
    chosen = [IN_MEGATRON_S_NAMES.get(target, target) for target in targets] or (
        *plain_adapters.ALL,
        *plain_adapters.MIXTRAL.values(),
    )
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=chosen)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    model = plain_adapters.adapted(folder, pairs, alpha=ALPHA)
    wanted = plain_adapters.learn(model, ROWS, PLAIN, steps=STEPS)
    assert wanted[-1][0] < wanted[0][0] - 0.05, "nothing was learnt, so nothing was compared"
    (told, found), *_ = run_ranks(
        case[0], learn_body, folder, adapter, case, targets, preloaded=preloaded
    )
    for ours, theirs in zip(told, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    plain_adapters.assert_pairs(found, model, pairs)


def beside(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Parameters, of which the quick run has a few."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.ranks) for name in names
    ]


@pytest.mark.parametrize("name", beside(FIRST, QUICK))
def test_three_steps_of_adapters_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name])


def logits_body(world: Any, folder: Path, adapter: Path, case: Case) -> Any:
    actor = actor_of(folder, adapter, case, OF_VOCABULARY)
    with actor.manager.adapters.switched_off():
        off = packed_logits(actor.manager, ROWS)
    return packed_logits(actor.manager, ROWS), off


def test_whole_logits_have_what_the_adapters_of_embedding_and_head_add(tmp_path: Path) -> None:
    """A loss of one's own may ask for them; ours does without."""
    folder, case = save_tiny(tmp_path / "model", "qwen3"), LAYOUTS["TP2, SP"]
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=OF_VOCABULARY)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    found, *_ = run_ranks(case[0], logits_body, folder, adapter, case)
    for logits, beside in zip(found, (pairs, {}), strict=True):
        model = plain_adapters.adapted(folder, beside, alpha=ALPHA)
        with torch.no_grad():
            wanted = [model(torch.tensor([row[:-1]])).logits[0] for row in ROWS if len(row) > 1]
        torch.testing.assert_close(logits, torch.cat(wanted), atol=TOLERANCE, rtol=0)


def kept_body(world: Any, folder: Path, adapter: Path, case: Case, kept: str) -> Any:
    lora = LoRA(rank=RANK, alpha=ALPHA, path=str(adapter), base_on_host=kept)  # type: ignore[arg-type]
    config = config_of(folder, case[1], case[2], lora=lora)
    actor = MegatronActor(config, Topology.create(case[1], seed=1))
    assert actor.described()["adapters"].get("base_on_host", "whole") == kept
    told = []
    for _ in range(STEPS):
        actor.residency.only()  # as a rollout does
        actor.residency.only(*PARTS)
        told += learn(actor, 1)
    return told, whole(actor.shards(), actor)


@pytest.mark.parametrize("name", beside(["TP1", "PP2", "DP2, distributed optimizer"], ["TP1"]))
def test_a_base_of_8_bits_on_the_host_is_the_rounded_base_everywhere(
    name: str, tmp_path: Path
) -> None:
    folder, case = save_tiny(tmp_path / "model", "qwen3"), LAYOUTS[name]
    pairs = plain_adapters.random_pairs(folder, rank=RANK)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    (told, found), *_ = run_ranks(case[0], kept_body, folder, adapter, case, "int8")
    weights = load_file(folder / "model.safetensors")
    for key, weight in weights.items():
        if key.endswith("_proj.weight"):
            weights[key] = torch.tensor([rounded(row) for row in weight.double().tolist()]).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (wanted, whole_base), *_ = run_ranks(case[0], kept_body, folder, adapter, case, "whole")
    for ours, theirs in zip(told, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    torch.testing.assert_close(found, whole_base, atol=2e-5, rtol=1e-4)


def scaled_body(world: Any, folder: Path, scalings: list[tuple[Path, float, bool]]) -> Any:
    found = []
    for adapter, alpha, rslora in scalings:
        lora = LoRA(rank=RANK, alpha=alpha, rslora=rslora, path=str(adapter))
        config = config_of(folder, P(), PLAIN, lora=lora)
        actor = MegatronActor(config, Topology.create(P(), seed=1))
        found.append(actor.log_probs(rows_of(ROWS)).logp)
    return found


def test_rank_stabilised_adapters_are_multiplied_by_alpha_over_the_root_of_the_rank(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    pairs = plain_adapters.random_pairs(folder, rank=RANK)
    scalings = []
    for alpha, rslora in ((ALPHA, False), (ALPHA / RANK**0.5, True)):
        adapter = plain_adapters.write_pairs(
            tmp_path / str(rslora), pairs, alpha=alpha, use_rslora=rslora
        )
        scalings.append((adapter, alpha, rslora))
    ((usual, stabilised),) = run_ranks(1, scaled_body, folder, scalings)
    torch.testing.assert_close(stabilised, usual, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("TP2, SP", WITH_VOCABULARY),
        pytest.param("PP2, full recompute", OF_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("TP2, distributed optimizer", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("TP1", OF_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("TP2", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("PP2", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("PP2 x VPP2", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("CP2", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("DP2, distributed optimizer", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("full recompute", ("v_proj", "embed_tokens"), marks=pytest.mark.ranks),
        pytest.param("DP2, overlapped", ("lm_head",), marks=pytest.mark.ranks),
        pytest.param("TP4 (2 key-value heads)", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("TP2 x PP2", tuple(IN_MEGATRON_S_NAMES), marks=pytest.mark.ranks),
        pytest.param("TP2 x PP2, SP, full recompute", WITH_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param(
            "TP2 x CP2, SP, selective recompute", WITH_VOCABULARY, marks=pytest.mark.ranks
        ),
        pytest.param("PP2 x VPP2 x DP2, overlapped", WITH_VOCABULARY, marks=pytest.mark.ranks),
    ],
)
def test_three_steps_of_adapters_on_embedding_and_head_are_those_of_plain_torch(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name], targets)


@pytest.mark.parametrize("name", beside(FEW, QUICK_MIXED))
def test_three_steps_of_adapters_on_experts_are_those_of_plain_torch(
    name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3-moe", MIXED[name])


@pytest.mark.ranks
@pytest.mark.parametrize("name", MANY)
def test_adapters_on_experts_learn_as_in_plain_torch_in_larger_layouts(
    name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3-moe", MIXED[name])


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_adapters_learn_as_in_plain_torch_in_larger_layouts(name: str, tmp_path: Path) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", LAYOUTS[name])


@pytest.mark.parametrize(
    ("variant", "targets", "name"),
    [
        pytest.param(
            *("qwen3", ("q_proj", "v_proj", "up_proj"), "TP4 (2 key-value heads)"),
            marks=pytest.mark.ranks,
        ),
        # the embedding is on both stages, and frozen
        pytest.param("qwen3-tied", (), "PP2", marks=pytest.mark.ranks),
        # norms behind the layers
        pytest.param("olmo2", (), "TP2", marks=pytest.mark.ranks),
        ("phi3", ("qkv_proj", "gate_up_proj"), "TP2, SP"),  # one HF tensor each
        # biases
        pytest.param("qwen2", ("k_proj", "o_proj"), "TP2, SP", marks=pytest.mark.ranks),
        pytest.param(
            *("qwen3-moe", ("q_proj", "k_proj", "v_proj", "o_proj"), "EP2"),
            marks=pytest.mark.ranks,
        ),
        ("qwen2-moe", (), "TP2, SP"),  # a shared expert
        pytest.param(
            *(
                "qwen3.5",
                ("in_proj_qkv", "in_proj_b", "out_proj", "q_proj", "down_proj"),
                "TP2, SP",
            ),
            marks=pytest.mark.ranks,
        ),
        pytest.param("mixtral", (), "EP2", marks=pytest.mark.ranks),
    ],
)
def test_adapters_on_some_layers_of_other_models_learn_as_in_plain_torch(
    variant: str, targets: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, LAYOUTS[name], targets)


def memory_body(
    world: Any, folder: Path, case: Case, targets: tuple[str, ...] = ()
) -> tuple[int, int, dict[str, int], set[str]]:
    """(elements of the adapters here, all elements, bytes by part, kinds of a checkpoint's tensors)"""
    actor = actor_of(folder, "", case, targets)
    learn(actor, 1)
    kept = set()
    for box in actor.training_tensors():
        ends = zip(box.offset, box.tensor.shape, box.shape, strict=True)
        assert all(start + size <= whole for start, size, whole in ends), f"{box.key} has padding"
        kept.add(box.key)
    assert all(".lora_" in key for key in kept), kept
    trained = sum(item.parameter.numel() for item in actor.manager.trained)
    held = sum(p.numel() for chunk in actor.manager.chunks for p in chunk.parameters())
    planned = models_of(actor.manager.cfg, auto="float32", narrow_whole=False)[POLICY]
    stage = actor.topology.pipeline_rank
    foretold = states(planned, world.size, stage)
    assert actor.residency.bytes() == foretold, (foretold, actor.residency.bytes())
    return trained, held, actor.residency.bytes(), {key.split("/")[0] for key in kept}


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param("TP1", (), marks=pytest.mark.ranks),
        pytest.param("TP2, distributed optimizer", (), marks=pytest.mark.ranks),
        ("TP2, distributed optimizer", WITH_VOCABULARY),
        pytest.param("PP2", OF_VOCABULARY, marks=pytest.mark.ranks),
    ],
)
def test_only_adapters_have_gradients_and_an_optimizers_state(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder, case = save_tiny(tmp_path, "qwen3"), LAYOUTS[name]
    for trained, held, bytes_of, kinds in run_ranks(case[0], memory_body, folder, case, targets):
        assert 0 < trained < held / 4
        # buffers are padded
        assert 4 * held <= bytes_of[PARAMETERS] < 4 * held + 2048
        assert bytes_of[ADAM] == 8 * trained
        assert 4 * trained <= bytes_of[GRADIENTS] < 4 * trained + 2048
        assert kinds == {"weights", "exp_avg", "exp_avg_sq"}


@pytest.mark.ranks
def test_memory_of_adapters_on_experts_is_as_foretold(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe")
    for name in ("EP2, full recompute", "EP2 x TP2 (one process an expert)"):
        for trained, _, bytes_of, _ in run_ranks(2, memory_body, folder, MIXED[name]):
            assert bytes_of[ADAM] > 0
            assert trained > 0


def reference_body(
    world: Any, folder: Path, adapter: Path, case: Case, targets: tuple[str, ...]
) -> Any:
    actor = actor_of(folder, adapter, case, targets, keep_reference=True, dropout=0.1)
    rows = rows_of(ROWS)
    learn(actor, 1)
    on = actor.log_probs(rows).logp
    off = actor.reference_log_probs(rows).logp
    assert torch.equal(actor.log_probs(rows).logp, on), "the adapters are not on again"
    plain = MegatronActor(config_of(folder, case[1], case[2]), Topology.create(case[1], seed=1))
    return on, off, plain.log_probs(rows).logp


@pytest.mark.parametrize(
    ("name", "targets"),
    [("TP2, SP", WITH_VOCABULARY), pytest.param("PP2", (), marks=pytest.mark.ranks)],
)
def test_the_reference_is_the_policy_with_its_adapters_off(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder, case = save_tiny(tmp_path / "model", "qwen3"), LAYOUTS[name]
    chosen = targets or plain_adapters.ALL
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=chosen)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    for on, off, plain in run_ranks(case[0], reference_body, folder, adapter, case, targets):
        assert torch.equal(off, plain)
        assert (on - off).abs().max() > 0.05


def fresh_body(world: Any, folder: Path, case: Case, targets: tuple[str, ...]) -> Any:
    actor = actor_of(folder, "", case, targets)
    rows = rows_of(ROWS)
    held = actor.adapters()
    assert held is not None
    before, matrices = actor.log_probs(rows).logp, whole(held.shards, actor)
    with actor.manager.adapters.switched_off():
        off = actor.log_probs(rows).logp
    return before, off, matrices, learn(actor, 1)


@pytest.mark.parametrize(
    ("variant", "case", "targets"),
    [
        ("qwen3", (2, P(tensor=2), PLAIN), WITH_VOCABULARY),
        # a shared expert
        pytest.param(
            *("qwen2-moe", (2, P(tensor=2, sequence=True, expert=2), SHARDED), ()),
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            *("qwen3", (4, P(tensor=2, pipeline=2), PLAIN), WITH_VOCABULARY),
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_fresh_adapters_change_nothing_and_are_the_same_in_every_layout(
    variant: str, case: Case, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    cases: list[Case] = [(1, P(), PLAIN), case]
    found = [run_ranks(case[0], fresh_body, folder, case, targets)[0] for case in cases]
    for before, off, matrices, _ in found:
        assert torch.equal(before, off)
        for name, matrix in matrices.items():
            if name.endswith(".lora_embedding_B"):  # drawn from a normal distribution
                assert matrix.std() == pytest.approx(1, abs=0.2)
                assert matrix.abs().max() > 2
            elif ".lora_A." in name:
                bound = matrix.shape[1] ** -0.5
                assert 0.9 * bound < matrix.abs().max() <= bound
            else:
                assert not matrix.any()
    (_, _, one, told), (_, _, other, again) = found
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert told[0] == pytest.approx(again[0], rel=TOLERANCE)


def zero_body(world: Any, folder: Path, case: Case) -> str:
    actor = actor_of(folder, "", case)
    learn(actor, 1)
    step = actor.step(given(rows_of(ROWS)), policy_loss())  # nothing pulls: all advantages are 0
    assert step["grad_norm"] == 0 and not step["empty_steps"]
    adapters.let_gradients_begin = lambda embedding: None
    with pytest.raises(NothingTrained) as raised:
        learn(actor_of(folder, "", case), 1)
    return str(raised.value)


def test_a_gradient_that_is_lost_behind_a_frozen_embedding_is_refused(tmp_path: Path) -> None:
    folder, case = save_tiny(tmp_path, "qwen3"), LAYOUTS["full recompute"]
    (lost,) = run_ranks(1, zero_body, folder, case)
    assert "no gradient reaches the adapters" in lost
    # of two processes with the same layers each has half of the rows
    assert run_ranks(2, zero_body, folder, case) == [lost, lost]


def dropout_body(
    world: Any, folder: Path, adapter: Path, case: Case, targets: tuple[str, ...]
) -> Any:
    found = []
    for share in (0.0, 0.5):
        lora = LoRA(rank=RANK, alpha=ALPHA, dropout=share, targets=list(targets), path=str(adapter))
        config = config_of(folder, case[1], case[2], lora=lora)
        actor = MegatronActor(config, Topology.create(case[1], seed=1))
        scored = actor.log_probs(rows_of(ROWS)).logp
        told = learn(actor, 2)
        matrices = {
            f"{item.hf_names} {item.rank}": item.parameter.detach().clone()
            for item in actor.manager.trained
        }
        found.append((scored, told, matrices))
    return found


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.ranks), True])
def test_adapters_drop_while_learning_alone_and_replicas_stay_alike(
    sequence: bool, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    pairs = plain_adapters.random_pairs(folder, rank=RANK)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    case = (2, P(tensor=2, sequence=sequence), PLAIN)
    assert_drops(run_ranks(2, dropout_body, folder, adapter, case, ()))


def test_adapters_of_experts_drop_while_learning_alone_and_replicas_stay_alike(
    tmp_path: Path,
) -> None:
    targets = ("gate_proj", "up_proj", "down_proj")  # every layer of this model has experts
    folder = save_tiny(tmp_path / "model", "qwen3-moe-plain-weights")
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=targets)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    case = MIXED["TP2, split experts"]
    assert_drops(run_ranks(2, dropout_body, folder, adapter, case, targets))


def assert_drops(ranks: Any) -> None:
    (plain, dropping), (_, other) = ranks
    assert torch.equal(plain[0], dropping[0])
    assert plain[1][0][0] != pytest.approx(dropping[1][0][0], rel=1e-4)
    for name in dropping[2].keys() & other[2].keys():  # those that every rank has whole
        torch.testing.assert_close(dropping[2][name], other[2][name], atol=1e-6, rtol=0)


def kept_by(actor: MegatronActor, folder: Path) -> TrainingCheckpoints:
    return TrainingCheckpoints(folder, {"policy": actor}, actor.manager.cfg)


def save_body(
    world: Any, model: Path, folder: Path, case: Case, targets: tuple[str, ...] = ()
) -> list[tuple[float, float]]:
    actor = actor_of(model, "", case, targets)
    learn(actor, 2)
    kept_by(actor, folder).save({}, step=2)
    return learn(actor, 3)


def resume_body(
    world: Any, model: Path, folder: Path, case: Case, rank: int, targets: tuple[str, ...] = ()
) -> list[tuple[float, float]] | str:
    lora = LoRA(rank=rank, alpha=ALPHA, targets=list(targets))
    config = config_of(model, case[1], case[2], lora=lora)
    actor = MegatronActor(config, Topology.create(case[1], seed=1))
    actor.topology.set_random_state(actor.random_state())
    try:
        assert kept_by(actor, folder).load(folder / "step_000002") == {}
    except CheckpointError as raised:
        return str(raised)
    return learn(actor, 3)


def refused_body(
    world: Any, folder: Path, tried: Sequence[tuple[Path, int]]
) -> list[list[tuple[float, float]] | str]:
    case = (2, P(tensor=2), PLAIN)
    return [resume_body(world, model, folder, case, rank) for model, rank in tried]


@pytest.mark.parametrize("targets", [pytest.param((), marks=pytest.mark.ranks), WITH_VOCABULARY])
def test_a_run_of_adapters_goes_on_bit_for_bit_from_a_checkpoint_that_holds_no_other_weights(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    model, folder = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept"
    case = (2, P(tensor=2), SHARDED)
    expected, *_ = run_ranks(2, save_body, model, folder, case, targets)
    reader = TrainingReader(folder / "step_000002")
    assert {key.split("/")[1] for key in reader.stored} == {"weights", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in key for key in reader.stored)
    assert run_ranks(2, resume_body, model, folder, case, RANK, targets)[0] == expected
    elsewhere = (2, P(pipeline=2, virtual_pipeline=2), PLAIN)
    found = run_ranks(2, resume_body, model, folder, elsewhere, RANK, targets)[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.ranks
def test_a_checkpoint_of_experts_with_adapters_is_read_under_another_layout(
    tmp_path: Path,
) -> None:
    model, folder = save_tiny(tmp_path / "model", "qwen3-moe"), tmp_path / "kept"
    split = (2, P(expert_tensor=2), SHARDED)
    expected, *_ = run_ranks(2, save_body, model, folder, split)
    assert run_ranks(2, resume_body, model, folder, split, RANK)[0] == expected
    spread = MIXED["EP2 x TP2 (one process an expert)"]
    found = run_ranks(2, resume_body, model, folder, spread, RANK)[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_adapters_of_another_rank_or_on_other_weights_are_not_resumed(tmp_path: Path) -> None:
    model, folder = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept"
    run_ranks(1, save_body, model, folder, (1, P(), PLAIN))
    strange = save_tiny(tmp_path / "strange", "qwen3", seed=1)
    tried = ((model, 2 * RANK), (model, 0), (strange, RANK))
    for other, none, elsewhere in run_ranks(2, refused_body, folder, tried):
        assert "rank=4" in other and "rank=8" in other
        assert "this run with no adapters" in none
        assert "belong to other weights" in elsewhere


MERGED = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def merge_body(
    world: Any, folder: Path, adapter: Path, case: Case, target: Path, targets: tuple[str, ...]
) -> None:
    actor = actor_of(folder, adapter, case, targets)
    frozen = [item.parameter.clone() for item in actor.manager.bound]
    learn(actor, 2)
    actor.manager.finish_param_sync()
    export(actor, target, actor.manager.cfg.trainer)
    by_hand = plain_adapters.merged_by_hand(folder, Path(f"{target}_adapter"))
    ranks = 2
    engine = BlockEngine(world.rank % ranks, ranks)
    pushed = EngineWeights(actor.shards(), engine, bucket_bytes=30_000)
    for version in range(2):
        pushed.push(version=version)
        for name, tensor in by_hand.items():
            wanted = engine.block(name, tensor).float()
            torch.testing.assert_close(engine.loaded[name], wanted, atol=1e-6, rtol=1e-5)
        assert all(each.held == each.sent == each.received for each in pushed.checksums())
        learn(actor, 1)
        actor.manager.finish_param_sync()
        export(actor, f"{target}_{version}", actor.manager.cfg.trainer)
        by_hand = plain_adapters.merged_by_hand(folder, Path(f"{target}_{version}_adapter"))
    for before, item in zip(frozen, actor.manager.bound, strict=True):
        assert torch.equal(before, item.parameter), "the frozen weights changed"


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("TP2, distributed optimizer", (*MERGED, *OF_VOCABULARY)),
        pytest.param("TP2 x PP2", MERGED, marks=pytest.mark.ranks),
        pytest.param("TP2 x PP2, SP, full recompute", OF_VOCABULARY, marks=pytest.mark.ranks),
        pytest.param("PP2 x VPP2 x DP2, overlapped", WITH_VOCABULARY, marks=pytest.mark.ranks),
    ],
)
def test_what_is_exported_and_pushed_is_the_base_and_the_product_of_its_pair(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    assert_exports_and_pushes_products(tmp_path, "qwen3", LAYOUTS[name], targets)


@pytest.mark.parametrize(
    "name", beside(["EP2 x TP2 (one process an expert)", "TP2, split experts"], QUICK_MIXED)
)
def test_what_is_exported_and_pushed_of_experts_is_the_base_and_the_product_of_its_pair(
    name: str, tmp_path: Path
) -> None:
    assert_exports_and_pushes_products(tmp_path, "qwen3-moe", MIXED[name])


def assert_exports_and_pushes_products(
    tmp_path: Path, variant: str, case: Case, targets: tuple[str, ...] = MERGED
) -> None:
    folder, target = save_tiny(tmp_path / "model", variant), tmp_path / "out"
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=targets)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    run_ranks(case[0], merge_body, folder, adapter, case, target, targets)
    (file,) = target.glob("*.safetensors")
    merged = load_file(file)
    by_hand = plain_adapters.merged_by_hand(folder, tmp_path / "out_adapter")
    base = load_file(folder / "model.safetensors")
    assert merged.keys() == by_hand.keys()
    for name, tensor in by_hand.items():
        torch.testing.assert_close(merged[name], tensor.float(), atol=1e-6, rtol=1e-5)
        changed = name.split(".")[-2] in targets
        assert torch.equal(merged[name], base[name]) != changed, name
    written = load_file(tmp_path / "out_adapter" / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].split(".")[-1] for name in written} == set(targets)
    of_pairs = {
        plain_adapters.PREFIX + name for module in pairs for name in plain_adapters.names_of(module)
    }
    assert written.keys() == of_pairs
