"""What fits, what does not, and which change is proposed."""

from dataclasses import replace
from pathlib import Path

import pytest

from rftmega.config import (
    AlgorithmConfig,
    KLConfig,
    LoRA,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.config.options.algorithms import GAE
from rftmega.config.options.teachers import Teacher
from rftmega.run.planning.data_plane import on_each_host
from rftmega.run.planning.fit import (
    Machine,
    changed,
    laid_out,
    misfits,
    push_bound,
    refused,
    stages_of,
)
from rftmega.run.planning.memory import Budget, on_host, resident
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.search import found_layout
from rftmega.run.planning.states import frozen_bytes, states
from rftmega.run.planning.times import Speeds

GB = 1e9
FOLDER = Path(__file__).parents[4] / "examples/planning/llama-3-70b"
SPEEDS = Speeds(989e12, 3350 * GB, 450 * GB, 50 * GB, 50 * GB, 8)


def config_of(
    parallel: ParallelConfig, *, offload: bool = True, engine: int = 8, distributed: bool = True
) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(path=str(FOLDER)),
        parallel=parallel,
        optimizer=OptimizerConfig(distributed=distributed),
        rollout=RolloutConfig(tensor=engine, max_prompt_tokens=1024, max_response_tokens=3072),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=8192, prompts_per_step=128, offload=offload
        ),
    )
    config.critic.parallel, config.critic.optimizer = config.parallel, config.optimizer
    return config


def machine(devices: int = 64, memory: float = 80, host: float = 0) -> Machine:
    return Machine(devices, Budget(memory * GB, 4 * GB), SPEEDS, host * GB)


FITS = ParallelConfig(tensor=8, sequence=True, pipeline=4)


def reasons(config: RunConfig, where: Machine) -> dict[str, str]:
    models = models_of(config)
    assert refused(models, config, where) == []
    found = misfits(models, config, where, push_bound(models[POLICY], config))
    return {reason.phase: reason.reason for reason in found}


def test_a_host_holds_what_a_save_writes_from() -> None:
    """A copy of weights, main parameters and Adam's two moments: with offloading they are there
    twice, and gradients never.
    """
    config = config_of(FITS)
    models, stages = models_of(config), {POLICY: 1}
    before = on_host(models, config, 64, stages)
    config.checkpoint.every = 1
    copied = on_host(models, config, 64, stages)["checkpoint"]
    held = states(models[POLICY], 64, 1)
    assert "checkpoint" not in before
    assert copied == before["offload"] == sum(held.values()) - held["gradients"]


def test_a_base_of_8_bits_takes_less_of_the_host() -> None:
    """17 bits for each 16 of its linear layers: of 80 layers 20 on a stage, an eighth of each."""
    config = config_of(FITS)
    config.model.lora = LoRA(rank=16)
    found = []
    for kept in ("whole", "int8"):
        config.model.lora.base_on_host = kept  # type: ignore[assignment]
        found.append(on_host(models_of(config), config, 64, {POLICY: 1})["offload"])
    hidden, keys, inner = 8192, 1024, 28672
    linear = 20 * hidden * (2 * hidden + 2 * keys + 3 * inner) // 8
    assert found[0] - found[1] == linear * 2 - linear - linear // 64 * 4


def with_adapters(config: RunConfig, *, kl: float = 0.0) -> RunConfig:
    config.model.lora = LoRA(rank=16)
    config.algorithm = AlgorithmConfig(advantage=GAE(), kl=KLConfig(coef=kl))
    return config


def test_the_frozen_weights_that_policy_and_critic_share_are_counted_once() -> None:
    totals, hosts, stages = [], [], {POLICY: 1, "critic": 1}
    for alike in (True, False):
        for offload in (True, False):
            config = with_adapters(config_of(FITS, offload=offload))
            if not alike:
                config.critic.parallel = replace(FITS, recompute="full")
            models = models_of(config)
            found = resident(models, config, 64, stages)
            held = {name: states(model, 64, 1) for name, model in models.items()}
            assert found["update_critic"] == held["critic"] or not offload
            totals.append(sum(found["update"].values()))
            hosts.append(on_host(models, config, 64, stages).get("offload", 0))
    base = frozen_bytes(models["critic"], 1)
    assert base > 4 * GB
    (turns, together), (again, apart) = totals[:2], totals[2:]
    assert turns == again
    assert apart - together == hosts[2] - hosts[0] == base


def test_the_host_keeps_no_frozen_weights_of_a_model_with_adapters_a_second_time() -> None:
    config, stages = with_adapters(config_of(FITS), kl=0.1), {POLICY: 1, "critic": 1}
    config.checkpoint.every = 1
    models = models_of(config)
    found = on_host(models, config, 64, stages)
    assert "reference" not in found, "it is the policy without its adapters"
    trained = sum(
        sum(states(model, 64, 1).values())
        - states(model, 64, 1)["gradients"]
        - frozen_bytes(model, 1)
        for model in models.values()
    )
    assert found["checkpoint"] == trained < GB


def test_what_fits_has_no_reasons_and_less_memory_has_one_a_phase() -> None:
    assert reasons(config_of(FITS), machine()) == {}
    assert reasons(config_of(FITS), machine(memory=50)).keys() == {"update"}
    assert reasons(config_of(FITS), machine(memory=24)).keys() == {"rollout", "update", "push"}
    assert reasons(config_of(FITS), machine(host=100)).keys() == {"host"}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (config_of(FITS, engine=1), {"rollout.tensor"}),
        (config_of(ParallelConfig(tensor=8, sequence=True)), {"parallel.pipeline"}),
        (
            config_of(ParallelConfig(tensor=8, sequence=True), engine=1),
            {"parallel.pipeline", "rollout.tensor"},
        ),
    ],
)
def test_the_nearest_that_fits_changes_no_more_than_it_must(
    config: RunConfig, changes: set[str]
) -> None:
    where = machine()
    assert reasons(config, where)
    found = found_layout(models_of(config), config, where, "nearest")
    proposal, rejected = found.proposal, found.rejected
    assert proposal is not None
    assert proposal.changes.keys() == changes
    assert reasons(changed(config, proposal.changes), where) == {}
    for others, why in rejected:
        assert len(others) <= len(changes) + 3  # one thing may be several options
        assert "\n" not in why.reason


def test_without_offload_everything_stays_beside_the_engine() -> None:
    there, away = (config_of(FITS, offload=offload) for offload in (False, True))
    assert reasons(there, machine(memory=61)).keys() == {"rollout"}
    assert reasons(away, machine(memory=61)) == {}


def test_a_change_leaves_the_config_that_it_is_made_to_alone_and_takes_the_critic_along() -> None:
    config = config_of(FITS)
    found = changed(config, {"parallel.tensor": 4, "optimizer.distributed": False})
    assert (config.parallel.tensor, config.optimizer.distributed) == (8, True)
    assert (found.critic.parallel.tensor, found.critic.optimizer.distributed) == (4, False)
    assert laid_out(models_of(config), found)[POLICY].parallel.tensor == 4


def test_where_nothing_fits_nothing_is_proposed() -> None:
    config = config_of(FITS)
    found = found_layout(models_of(config), config, machine(host=1, memory=40), "nearest")
    assert found.proposal is None
    assert found.rejected
    assert found.why


def test_a_teacher_is_planned_on_its_own_backend_and_in_its_own_layout() -> None:
    config = config_of(FITS)
    pipeline, shards = ParallelConfig(tensor=4, pipeline=2), ParallelConfig(tensor=2)
    config.algorithm.teachers = [
        Teacher(path=str(FOLDER), parallel=pipeline),
        Teacher(path=str(FOLDER), backend="fsdp", parallel=shards, vocabulary="top_k", top_k=7),
    ]
    models = models_of(config)
    assert [planned.groups is None for planned in models.values()] == [True, True, False]
    moved = laid_out(models, changed(config, {"parallel.tensor": 4}))
    assert [planned.parallel.tensor for planned in moved.values()] == [4, 4, 2]
    assert [planned.optimizer is None for planned in moved.values()] == [False, True, True]
    assert refused(models, config, machine()) == []
    parameters = models[POLICY].model.parameters
    stages = stages_of(models, 64)
    phases = resident(models, config, 64, stages[-1])
    assert stages[-1] == {POLICY: 3, "teacher": 1, "teacher_2": 0}
    # its shares are bfloat16 under Megatron, and under FSDP float32 and bfloat16
    assert phases["score_teacher"]["parameters"] == pytest.approx(2 * parameters / 8, rel=0.01)
    assert phases["score_teacher_2"]["parameters"] == pytest.approx(6 * parameters / 64, rel=0.01)
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    told = on_each_host(config, None, models)["teachers"]
    assert told == rows * 3072 * ((4 + 2 * 8192) + (4 + 7 * 4 + 8 * 4))


def test_a_teacher_of_megatron_has_stages_beside_a_policy_of_fsdp() -> None:
    config = config_of(ParallelConfig())
    config.backend = "fsdp"
    pipeline = ParallelConfig(pipeline=2)
    config.algorithm.teachers = [Teacher(path=str(FOLDER), backend="megatron", parallel=pipeline)]
    models = models_of(config)
    assert refused(models, config, machine()) == []
    assert stages_of(models, 64) == [{POLICY: 0, "teacher": stage} for stage in (0, 1)]


def test_a_teacher_that_stays_on_the_host_is_counted_apart_from_those_that_move() -> None:
    config = config_of(FITS)
    moved = on_host(models_of(config), config, 64, {POLICY: 1})
    own = ParallelConfig(cpu_offload=True)
    config.algorithm.teachers = [Teacher(path=str(FOLDER), backend="fsdp", parallel=own)]
    models, stages = models_of(config), {POLICY: 1, "teacher": 0}
    found = on_host(models, config, 64, stages)
    held = states(models["teacher"], 64, 0)["parameters"]
    assert found == moved | {"sharded": held}
    assert resident(models, config, 64, stages)["score_teacher"]["parameters"] == 0
