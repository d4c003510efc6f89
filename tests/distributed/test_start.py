"""A colocated engine starts on a device that the trainer has left, and a plan says beforehand where
it can't.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rftmega.algorithms.losses import policy_loss
from rftmega.backends.megatron import MegatronBackend, backend
from rftmega.config import OptimizerConfig, ParallelConfig, RolloutConfig, RunConfig
from rftmega.config.options.algorithms import GAE, GroupNorm
from rftmega.core.types import Prompt, Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.run.placement import engines
from rftmega.run.placement.reinforcement import ReinforcementStrategy
from rftmega.run.planning.fit import stages_of
from rftmega.run.planning.memory import Budget, on_device
from rftmega.run.planning.models import models_of
from rftmega.runtime.device.residency import ADAM, PARTS
from rftmega.trainer.experience import ExperienceMaker, collect, complete
from tests.layouts import config_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
MIB = 2**20
SIZES = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


class Case(NamedTuple):
    """A layout, and the device that it starts on, in MiB; `fraction` is the engine's."""

    parallel: ParallelConfig
    memory: float
    fraction: float = 0.5
    offload: bool = True
    critic: bool = False
    reward_model: bool = False
    distributed: bool = False
    fits: bool = True


# A policy of 4.2 million parameters: 16 MiB of weights, as much of gradients; without offload they
# stay, a critic's as well.
CASES = {
    1: {
        "all that it may have": Case(P(), 300, fraction=1.0),
        "more, without offload": Case(P(), 300, fraction=1.0, offload=False, fits=False),
        "no room for it beside the policy": Case(P(), 100, fraction=0.75, offload=False, fits=False),
        "room for it beside the policy": Case(P(), 150, fraction=0.75, offload=False),
        "no room beside policy and critic": Case(P(), 150, fraction=0.75, offload=False, critic=True, fits=False),
        "policy, critic and judge make room": Case(P(), 150, fraction=0.99, critic=True, reward_model=True),
        "and do not without offload": Case(P(), 150, fraction=0.75, offload=False, critic=True, reward_model=True, fits=False),
    },
    2: {
        "two stages halve what stays": Case(P(pipeline=2), 100, fraction=0.75, offload=False),
        "one of two replicas does not": Case(P(), 100, fraction=0.75, offload=False, distributed=True, fits=False),
        "tensor parallel, parked": Case(P(tensor=2, sequence=True), 60, fraction=1.0, critic=True),
    },
}  # fmt: skip


def run_of(folder: Path, case: Case) -> RunConfig:
    optimizer = OptimizerConfig(learning_rate=1e-3, distributed=case.distributed)
    config = config_of(folder, case.parallel, optimizer)
    config.rollout = RolloutConfig(
        engine="scripted",
        max_prompt_tokens=8,
        max_response_tokens=6,
        memory_fraction=case.fraction,
        max_batch=4,
    )
    config.trainer.offload = case.offload
    config.critic.parallel, config.critic.optimizer = config.parallel, config.optimizer
    config.algorithm.advantage = GAE() if case.critic else GroupNorm()
    if case.reward_model:
        config.reward.model, config.reward.model_path = 1.0, str(folder)
    return config


class NoMemory(Exception):
    """As vLLM's request_memory raises."""


def start_body(world: Any, folder: Path, cases: Sequence[Case]) -> list[bool]:
    """Whether the engine could start, in each case."""
    return [starts(world, folder, case) for case in cases]


class Demanding(ScriptedEngine):
    """Has all that it may have from its start until it sleeps."""

    def trace_load(self, named_tensors: Any) -> None:
        assert not self._held, "the trainer came back before it slept"
        super().trace_load(named_tensors)


def starts(world: Any, folder: Path, case: Case) -> bool:
    built: list[Any] = []

    def held() -> int:
        found = sum(sum(model.manager.residency.bytes().values()) for model in built)
        assert found == 0 or not case.offload, "something of the trainer is on the device"
        return found

    def watched(kind: Any) -> Any:
        def build(*given: Any, **named: Any) -> Any:
            held()
            built.append(kind(*given, **named))
            return built[-1]

        return build

    patch = pytest.MonkeyPatch()
    for name in ("MegatronActor", "MegatronCritic"):
        patch.setattr(backend, name, watched(getattr(backend, name)))

    def create(
        config: RunConfig, world: Any, *, vocabulary: int, stop_ids: Sequence[int], experts: Any
    ) -> Any:
        if case.memory * MIB - held() < config.rollout.memory_fraction * case.memory * MIB:
            raise NoMemory
        return Demanding(config.rollout, vocabulary=vocabulary, stop_ids=stop_ids)

    patch.setattr(engines, "create", create)
    try:
        made = ReinforcementStrategy(run_of(folder, case), world, MegatronBackend(), stop_ids=[1])
    except NoMemory:
        return False
    finally:
        patch.undo()
    assert made.local_engine.status.name == "SLEEPED"
    return True


def planned(folder: Path, case: Case, world: int) -> bool:
    config = run_of(folder, case)
    models = models_of(config, auto="float32", narrow_whole=False)
    found = [
        on_device(models, config, world, place, Budget(case.memory * MIB), 0)["start"]
        for place in stages_of(models, world)
    ]
    assert all(ADAM not in parts for parts in found)
    return all(sum(parts.values()) <= case.memory * MIB for parts in found)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_an_engine_starts_where_the_plan_says_so(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the models are tiny, so is what an engine works in
    monkeypatch.setattr("rftmega.run.planning.engine.BATCHED", 64)
    folder, cases = save_tiny(tmp_path, "qwen3", **SIZES), CASES[processes]
    started = run_ranks(processes, start_body, folder, list(cases.values()))
    for (name, case), found in zip(cases.items(), zip(*started, strict=True), strict=True):
        assert (name, all(found), planned(folder, case, processes)) == (name, case.fits, case.fits)


def cycle_body(world: Any, folder: Path) -> Any:
    """What is on the device when the engine starts, when it has answered, and when the trainer has
    learnt.
    """
    seen = []
    config = run_of(folder, Case(P(tensor=2), 1.0, critic=True))
    made = ReinforcementStrategy(replace(config), world, MegatronBackend(), stop_ids=[1])
    residencies = made.phases.models
    seen.append({name: sum(residency.bytes().values()) for name, residency in residencies.items()})
    made.weights.push(version=0)
    prompts = [Prompt((5, 9)), Prompt((3,))] * 2
    completions = made.engine.generate(prompts, seeds=[1, 2, 3, 4], sampling=Sampling(1.0))
    samples = collect(
        prompts,
        complete(completions),
        lambda p, c: [{"reward": float(len(x.response_ids))} for x in c],
        samples_per_prompt=2,
    )
    experience = ExperienceMaker(made.policy).make(samples)
    before = made.policy.log_probs(samples.rows).logp.flat
    made.policy.step(experience, policy_loss())
    held = residencies["policy"].bytes()
    assert all(held[part] for part in PARTS if part != "main_parameters"), held
    seen.append((made.policy.log_probs(samples.rows).logp.flat - before).abs().max().item())
    return seen


def test_after_such_a_start_policy_and_critic_learn(tmp_path: Path) -> None:
    for held, moved in run_ranks(2, cycle_body, save_tiny(tmp_path, "qwen3")):
        assert held["critic"] == 0 < held["policy"], "weights alone, for the plan of the push"
        assert moved > 1e-3
