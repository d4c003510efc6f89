"""Layouts that are searched for: what is proposed fits, and no two answers contradict each other."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import pytest

from rftmega.config import (
    AlgorithmConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
)
from rftmega.config.options.preference import DPO, KTO, PreferenceLoss
from rftmega.run.planning.backends import on_backend, recommended
from rftmega.run.planning.fit import Machine, changed, laid_out, misfits, push_bound, refused
from rftmega.run.planning.memory import Budget
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.search import ALIKE, Order, Search, found_layout
from rftmega.run.planning.times import Speeds, seconds

GB = 1e9
EXAMPLES = Path(__file__).parents[4] / "examples/planning"
SPEEDS = Speeds(989e12, 3350 * GB, 450 * GB, 50 * GB, 50 * GB, 8)
ORDERS: tuple[Order, ...] = ("nearest", "quickest")


def run_of(name: str) -> RunConfig:
    """A run with default options."""
    config = RunConfig(model=ModelConfig(path=str(EXAMPLES / name)))
    config.trainer.prompts_per_step = 128
    config.critic.parallel, config.critic.optimizer = config.parallel, config.optimizer
    return config


def machine(devices: int, memory: float = 80) -> Machine:
    return Machine(devices, Budget(memory * GB, 4 * GB), SPEEDS)


def fits(config: RunConfig, where: Machine) -> bool:
    models = models_of(config)
    bound = push_bound(models[POLICY], config)
    return not refused(models, config, where) and not misfits(models, config, where, bound)


@pytest.mark.parametrize(
    ("name", "devices", "memory"),
    [
        pytest.param("qwen3-30b-a3b", 64, 80, marks=pytest.mark.ranks),
        pytest.param("qwen3-30b-a3b", 8, 80, marks=pytest.mark.ranks),
        ("qwen3-8b", 8, 80),
        ("qwen3-8b", 1, 24),
        pytest.param("llama-3-70b", 32, 80, marks=pytest.mark.ranks),
    ],
)
def test_what_is_proposed_fits_and_both_orders_agree_whether_anything_does(
    name: str, devices: int, memory: float
) -> None:
    config, where = run_of(name), machine(devices, memory)
    best = recommended(config, where).best
    for backend in ("megatron", "fsdp"):
        own = on_backend(config, backend)
        found = {order: found_layout(models_of(own), own, where, order) for order in ORDERS}
        assert len({one.proposal is None for one in found.values()}) == 1
        assert (best[backend].config is None) == (found["quickest"].proposal is None)
        for one in found.values():
            if one.proposal is None:
                assert one.why
            else:
                assert fits(one.proposal.config, where)
                assert fits(changed(own, one.proposal.changes), where)


def test_a_moe_of_experts_with_default_options_is_told_a_layout_that_fits() -> None:
    """64 devices of 80 GB: it needs another engine and another layout at once."""
    config, where = run_of("qwen3-30b-a3b"), machine(64)
    assert not fits(config, where)
    found = recommended(config, where)
    assert found.backend == "megatron"
    best = found.best["megatron"].config
    assert best is not None
    assert fits(best, where)
    assert best.rollout.tensor > 1
    assert 1 < best.parallel.expert <= where.speeds.node, "experts within a node"
    assert best.parallel.pipeline <= 4, "no stage without need"
    known = on_backend(config, "megatron")
    known.parallel = ParallelConfig(tensor=2, sequence=True, pipeline=8, expert=8, recompute="full")
    known.critic.parallel = known.parallel
    known.rollout = RolloutConfig(tensor=2)
    assert fits(known, where)


def test_no_layout_is_quicker_than_the_quickest_but_for_a_rooflines_error() -> None:
    """Against all layouts of Llama-3-70B on 64 devices, one after the other, of one engine."""
    config, where = run_of("llama-3-70b"), machine(64)
    config.rollout = RolloutConfig(tensor=8, memory_fraction=0.85)
    found = found_layout(models_of(config), config, where, "quickest").proposal
    assert found is not None
    took = []
    for tensor, pipeline, recompute in product((1, 2, 4, 8), (1, 2, 4, 8), ("none", "full")):
        layout = ParallelConfig(
            tensor=tensor,
            sequence=tensor > 1,
            pipeline=pipeline,
            recompute=recompute,  # type: ignore[arg-type]
        )
        candidate = replace(config, parallel=layout)
        candidate.critic.parallel = layout
        if fits(candidate, where):
            models = laid_out(models_of(candidate), candidate)
            phases = seconds(models, candidate, 64, None, None, SPEEDS)
            took.append(sum(sum(parts.values()) for parts in phases.values()))
    own = laid_out(models_of(found.config), found.config)
    phases = seconds(own, found.config, 64, None, None, SPEEDS)
    assert len(took) > 5
    assert sum(sum(parts.values()) for parts in phases.values()) <= ALIKE**2 * min(took)


def test_stages_of_very_different_sizes_are_not_looked_at() -> None:
    """61 layers over 32 stages would be one each, and 30 in the last."""
    config = run_of("deepseek-v3")
    where = machine(512)
    axes = Search(models_of(config), config, where).axes()
    stages = {change.get("parallel.pipeline") for change in axes[1]}
    assert 32 in stages, "the choice itself is there"
    pipelines = {
        trainer.changes.get("parallel.pipeline", 1)
        for trainer in Search(models_of(config), config, where)._trainers
    }
    assert 32 not in pipelines
    assert 16 in pipelines


def test_stages_that_are_not_equal_take_longer() -> None:
    config = run_of("deepseek-v3")
    config.parallel = ParallelConfig(pipeline=16, last_stage_layers=1, expert=8)
    found = seconds(models_of(config), config, 512, None, None, SPEEDS)["update"]
    assert found["uneven stages"] == pytest.approx(found["compute"] * (4 * 16 / 61 - 1))


def test_a_step_of_pairs_takes_twice_as_long_and_kto_scores_mismatched_responses_too() -> None:
    def phases(task: Literal["sft", "preference"], options: PreferenceLoss) -> dict[str, float]:
        config = run_of("qwen3-8b")
        config.algorithm = AlgorithmConfig(task=task, preference=options)
        found = seconds(models_of(config), config, 8, None, None, SPEEDS)
        return {phase: parts["compute"] for phase, parts in found.items()}

    sft, dpo, kto = phases("sft", DPO()), phases("preference", DPO()), phases("preference", KTO())
    assert dpo == {"update": pytest.approx(2 * sft["update"])}
    assert kto == dpo | {"score": pytest.approx(dpo["update"] / 3)}


def test_the_optimizer_is_sharded_by_default_where_somebody_shares_it() -> None:
    chosen = OptimizerConfig()
    assert not chosen.shards_states(1)
    assert chosen.shards_states(2)
    assert not OptimizerConfig(distributed=False).shards_states(2)
    assert not OptimizerConfig(name="muon").shards_states(2)
    config = run_of("qwen3-8b")
    config.rollout.tensor = 2
    config.parallel.tensor, config.parallel.sequence = 2, True
    config.parallel.recompute = "full"
    assert fits(config, machine(8)), "8 billion parameters on 8 devices"
