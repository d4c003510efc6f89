"""Bytes of weights and optimizer by hand, for a model whose numbers are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import (
    AlgorithmConfig,
    LoRA,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from rftmega.config.options.algorithms import GAE, GroupNorm
from rftmega.run.planning.models import POLICY, PlannedModel, models_of
from rftmega.run.planning.states import (
    ADAM,
    GRADIENTS,
    MAIN_PARAMETERS,
    PARAMETERS,
    elements_of,
    frozen_bytes,
    states,
)

PLANNING = Path(__file__).parents[4] / "examples/planning"
P = ParallelConfig


def planned(
    name: str,
    parallel: ParallelConfig,
    *,
    distributed: bool = False,
    critic: bool = False,
    rank: int = 0,
) -> PlannedModel:
    config = RunConfig(
        model=ModelConfig(path=str(PLANNING / name), lora=LoRA(rank=rank)),
        parallel=parallel,
        optimizer=OptimizerConfig(distributed=distributed),
        algorithm=AlgorithmConfig(advantage=GAE() if critic else GroupNorm()),
    )
    config.critic.parallel, config.critic.optimizer = config.parallel, config.optimizer
    return models_of(config)["critic" if critic else POLICY]


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama-3-70b", P()),
        ("llama-3-70b", P(pipeline=4)),
        ("llama-3-70b", P(pipeline=2, virtual_pipeline=4)),
        ("qwen3-235b-a22b", P(pipeline=8, last_stage_layers=10)),
    ],
)
def test_stages_hold_every_parameter_once(name: str, parallel: ParallelConfig) -> None:
    model = planned(name, parallel)
    assert (
        sum(elements_of(model, stage) for stage in range(parallel.pipeline))
        == model.model.parameters
    )


def test_bytes_a_parameter_are_those_of_mixed_precision_training() -> None:
    """2 for the weight, 4 for its gradient, 4 for the main parameter, 8 for Adam (arXiv:1910.02054,
    but for the gradient's 4).
    """
    model = planned("llama-3-70b", P(tensor=8, sequence=True))
    held, elements = states(model, 64, 0), elements_of(model, 0)
    assert held == {
        PARAMETERS: 2 * elements,
        GRADIENTS: 4 * elements,
        MAIN_PARAMETERS: 4 * elements,
        ADAM: 8 * elements,
    }
    full = states(replace(model, itemsize=4), 64, 0)
    assert full == held | {PARAMETERS: 4 * elements, MAIN_PARAMETERS: 0}


def test_the_distributed_optimizer_shares_main_parameters_and_adam_only() -> None:
    alone = states(planned("llama-3-70b", P(tensor=8, sequence=True)), 64, 0)
    shared = states(planned("llama-3-70b", P(tensor=8, sequence=True), distributed=True), 64, 0)
    for kind, share in ((PARAMETERS, 1), (GRADIENTS, 1), (MAIN_PARAMETERS, 8), (ADAM, 8)):
        assert shared[kind] == pytest.approx(alone[kind] / share, rel=1e-4)


@pytest.mark.parametrize(("kept", "share"), [("bfloat16", 1 / 2), ("8bit", (1 + 4 / 256) / 4)])
def test_moments_of_fewer_bits_take_less(kept: Any, share: float) -> None:
    model = planned("llama-3-70b", P(tensor=8, sequence=True))
    assert model.optimizer is not None
    narrow = replace(model, optimizer=replace(model.optimizer, states=kept))
    wide, found = states(model, 64, 0), states(narrow, 64, 0)
    assert found[ADAM] == int(wide[ADAM] * share)
    assert found[MAIN_PARAMETERS] == wide[MAIN_PARAMETERS]


def test_experts_are_shared_by_fewer_processes_than_what_is_dense() -> None:
    """Of DeepSeek-V3 on 512 processes, TP8 x PP16: 4 hold the same dense shard, and with 32
    processes an expert's 1.
    """
    parallel = P(tensor=8, sequence=True, pipeline=16, last_stage_layers=1, expert=32)
    model = planned("deepseek-v3", parallel, distributed=True)
    held = states(model, 512, 1)
    experts = 4 * 8 * 3 * 7168 * 2048  # layers of a stage, experts a process, matrices
    dense = elements_of(model, 1) - experts
    assert held[ADAM] == pytest.approx(8 * (experts + dense / 4), rel=1e-4)


def test_a_critic_has_a_number_a_token_instead_of_a_vocabulary() -> None:
    policy, critic = (
        planned("llama-3-70b", P(pipeline=4), critic=critic) for critic in (False, True)
    )
    head = 128256 * 8192
    assert elements_of(policy, 0) == elements_of(critic, 0)
    assert elements_of(policy, 3) - elements_of(critic, 3) == head - 8192 - 1


def test_of_a_model_with_adapters_they_alone_have_gradients_and_an_optimizer() -> None:
    model = planned("llama-3-70b", P(), rank=16)
    hidden, ffn, keys = 8192, 28672, 1024
    layers = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    layers += [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
    pairs = 80 * 16 * sum(into + out for into, out in layers)
    held = states(model, 1, 0)
    assert held == {
        PARAMETERS: 2 * (elements_of(model, 0) + pairs),
        GRADIENTS: 4 * pairs,
        MAIN_PARAMETERS: 4 * pairs,
        ADAM: 8 * pairs,
    }
    # what is not split: the first matrix of column-parallel layers, the second of the others
    whole = 80 * 16 * (5 * hidden + 2 * hidden)
    shared = states(planned("llama-3-70b", P(tensor=8, sequence=True), rank=16), 8, 0)
    assert shared[ADAM] == 8 * (whole + (pairs - whole) // 8)


def test_of_a_critic_with_adapters_they_and_its_head_alone_learn() -> None:
    policy, critic = (
        planned("llama-3-70b", P(), critic=critic, rank=16) for critic in (False, True)
    )
    ours, theirs = states(critic, 1, 0), states(policy, 1, 0)
    head = 8192 + 1
    assert ours[ADAM] - theirs[ADAM] == 8 * head
    assert ours[GRADIENTS] - theirs[GRADIENTS] == 4 * head
    assert theirs[PARAMETERS] - ours[PARAMETERS] == 2 * (128256 * 8192 - head)
    assert frozen_bytes(critic, 0) == 2 * (elements_of(critic, 0) - head)
    assert frozen_bytes(planned("llama-3-70b", P(), critic=True), 0) == 0


def test_adapters_of_experts_are_where_the_experts_are() -> None:
    """Of Qwen3-235B-A22B: 94 layers of 128 experts."""
    hidden, ffn, heads, keys, rank = 4096, 1536, 8192, 512, 16
    attention = 94 * rank * (2 * (hidden + heads) + 2 * (hidden + keys))
    experts = 94 * rank * 128 * 3 * (hidden + ffn)
    spread = states(planned("qwen3-235b-a22b", P(expert=8), rank=rank), 8, 0)
    assert spread[ADAM] == 8 * (attention + experts // 8)
    whole = 94 * rank * 128 * 3 * hidden  # the first matrix of gate and up, the second of down
    split = states(planned("qwen3-235b-a22b", P(expert_tensor=2), rank=rank), 2, 0)
    assert split[ADAM] == 8 * (attention + whole + (experts - whole) // 2)
