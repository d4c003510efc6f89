"""Adapters learn as in plain torch under every layout, and nothing else learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.experience import given
from rftmega.megatron import MegatronActor
from rftmega.parallel.topology import Topology
from rftmega.weights import Exporter
from tests import plain_adapters
from tests.layouts import config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
RANK, ALPHA, STEPS = 4, 6.0, 3
ROWS = [
    [(37 * i + 11 * b) % 131 for i in range(n)] for b, n in enumerate((30, 2, 17, 5, 26, 9, 3, 21))
]
PLAIN = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, clip_grad=0.5)
SHARDED = replace(PLAIN, distributed=True)
OVERLAPPED = replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True)
Case = tuple[int, ParallelConfig, OptimizerConfig]
QUICK: dict[str, Case] = {
    "TP1": (1, P(), PLAIN),
    "TP2": (2, P(tensor=2), PLAIN),
    "TP2, SP": (2, P(tensor=2, sequence=True), PLAIN),
    "PP2": (2, P(pipeline=2), PLAIN),
    "PP2 x VPP2": (2, P(pipeline=2, virtual_pipeline=2), SHARDED),
    "CP2": (2, P(context=2), PLAIN),
    "DP2, distributed optimizer": (2, P(), SHARDED),
    "full recompute": (1, P(recompute="full"), PLAIN),
}
EXHAUSTIVE: dict[str, Case] = {
    "DP2, distributed optimizer, overlapped": (2, P(), OVERLAPPED),
    "TP4 (2 key-value heads)": (4, P(tensor=4), SHARDED),
    "TP2 x PP2, SP, full recompute": (4, P(tensor=2, pipeline=2, sequence=True, recompute="full"), SHARDED),
    "TP2 x CP2, SP, selective recompute": (4, P(tensor=2, context=2, sequence=True, recompute="selective"), SHARDED),
    "PP2 x VPP2 x DP2, overlapped": (4, P(pipeline=2, virtual_pipeline=2), OVERLAPPED),
}  # fmt: skip


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
    adapters = actor.adapters()
    assert adapters is not None
    return told, whole(adapters.shards, actor)


def assert_learns_as_plain_torch(
    tmp_path: Path, variant: str, cases: dict[str, Case], targets: tuple[str, ...] = ()
) -> None:
    folder = save_tiny(tmp_path / "model", variant)
    chosen = targets or plain_adapters.ALL
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=chosen)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    model = plain_adapters.adapted(folder, pairs, alpha=ALPHA)
    wanted = plain_adapters.learn(
        model,
        ROWS,
        steps=STEPS,
        clip=PLAIN.clip_grad,
        lr=PLAIN.learning_rate,
        eps=PLAIN.epsilon,
        weight_decay=PLAIN.weight_decay,
        betas=(PLAIN.beta1, PLAIN.beta2),
    )
    assert wanted[-1][0] < wanted[0][0] - 0.05, "nothing was learnt, so nothing was compared"
    for name, case in cases.items():
        (told, found), *_ = run_ranks(case[0], learn_body, folder, adapter, case, targets)
        worst = max(
            abs(x - y) / y
            for a, b in zip(told, wanted, strict=True)
            for x, y in zip(a, b, strict=True)
        )
        print(name, worst)
        assert worst < 1e-5, (name, told, wanted)
        for module, (a, b) in plain_adapters.pairs_of(model).items():
            for matrix, ours in ((a, "lora_A"), (b, "lora_B")):
                torch.testing.assert_close(
                    found[f"{module}.{ours}.weight"],
                    matrix,
                    atol=2e-5,
                    rtol=1e-4,
                    msg=lambda text: f"{name}, {module}: {text}",
                )


@pytest.mark.parametrize("name", QUICK)
def test_three_steps_of_adapters_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", {name: QUICK[name]})


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_adapters_learn_as_in_plain_torch_in_larger_layouts(name: str, tmp_path: Path) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", {name: EXHAUSTIVE[name]})


@pytest.mark.parametrize(
    ("variant", "targets", "case"),
    [
        ("qwen3", ("q_proj", "v_proj", "up_proj"), (4, P(tensor=4), PLAIN)),
        # the embedding is on both stages, and frozen
        ("qwen3-tied", (), (2, P(pipeline=2), PLAIN)),
        ("olmo2", (), (2, P(tensor=2), PLAIN)),  # norms behind the layers
        ("phi3", ("qkv_proj", "gate_up_proj"), (2, P(tensor=2, sequence=True), PLAIN)),
        ("qwen2", ("k_proj", "o_proj"), (2, P(tensor=2, sequence=True), SHARDED)),  # biases
        ("qwen3-moe", ("q_proj", "k_proj", "v_proj", "o_proj"), (2, P(expert=2), SHARDED)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_adapters_on_some_layers_of_other_models_learn_as_in_plain_torch(
    variant: str, targets: tuple[str, ...], case: Case, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, {str(case): case}, targets)
