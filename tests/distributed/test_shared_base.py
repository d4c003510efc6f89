"""A critic that computes with the policy's frozen weights: the numbers of one with weights of its own,
and one copy of them on the device and on the host.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.losses import policy_loss
from rftmega.backends.megatron import MegatronActor, MegatronBackend, MegatronCritic
from rftmega.config import LoRA, RunConfig
from rftmega.config.options.algorithms import GAE
from rftmega.core.types import Experience
from rftmega.run.placement.colocated import ColocatedPolicy, ColocatedValues
from rftmega.run.placement.phases import DevicePhases
from rftmega.run.planning.memory import on_host, resident
from rftmega.run.planning.models import models_of
from rftmega.runtime.device.residency import Residency
from rftmega.runtime.parallel.topology import Topology
from tests.distributed.test_adapters import beside
from tests.distributed.test_critic import experience_of, square_loss
from tests.distributed.test_value_adapters import LAYOUTS, Case
from tests.layouts import config_of
from tests.ranks import LOCAL, run_ranks
from tests.tiny_models import save_tiny

STEPS = 3
SHARED = ("one process", "TP2, SP", "PP2 x VPP2", "DP2, overlapped")
QUICK = SHARED[:1]


class Told(NamedTuple):
    """What a run of a policy and a critic came to, and the bytes that it took."""

    numbers: list[Any]
    device: dict[str, int]  # by phase, of all weights, gradients and optimizers' states
    host: int
    predicted: dict[str, int]  # by phase, as `device`
    predicted_host: int
    base: int  # bytes of the frozen weights that both have
    fetched: list[int]  # bytes that came from the host, of each turn of one model after the other


def run_config(folder: Path, case: Case, dtype: str) -> RunConfig:
    config = config_of(
        folder, case[1], case[2], dtype=dtype, lora=LoRA(rank=4, alpha=6.0, dropout=0.1)
    )
    config.algorithm.advantage = GAE()
    config.critic.parallel, config.critic.optimizer = config.parallel, config.optimizer
    return config


def built(config: RunConfig, *, share: bool) -> tuple[MegatronActor, MegatronCritic]:
    backend = MegatronBackend()
    actor = backend.policy(config)
    if config.trainer.offload:
        actor.residency.only()
    if share:
        return actor, backend.value_model(config, role="critic")
    return actor, MegatronCritic(config, Topology.create(config.parallel, seed=config.trainer.seed))


def experience_of_policy(logp: Tensor) -> Experience:
    experience = experience_of()
    return replace(experience, old_logp=logp, advantage=1.0 * experience.mask)


def frozen_of(model: Any) -> list[Tensor]:
    return [
        parameter
        for chunk in model.manager.chunks
        for parameter in chunk.parameters()
        if not parameter.requires_grad
    ]


def on_device(*models: Any) -> int:
    """Bytes of storages that anything of the models has, each once."""
    found = {}
    for model in models:
        for part in model.residency.storages().values():
            found |= part
        for tensor in frozen_of(model):
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    return sum(storage.nbytes() for storage in found.values())


def turns_body(
    world: Any,
    folder: Path,
    case: Case,
    share: bool,
    offload: bool,
    dtype: str,
    kept: Literal["whole", "int8"] = "whole",
) -> Told:
    config = run_config(folder, case, dtype)
    config.model.lora.base_on_host = kept
    config.trainer.offload = offload
    actor, critic = built(config, share=share)
    if offload:
        critic.residency.only()
        assert on_device(actor, critic) == 0, "building the critic left something on the device"
    held = {"policy": actor.residency, "critic": critic.residency}
    phases = DevicePhases(held, offload=offload)
    policy, values = ColocatedPolicy(actor, phases), ColocatedValues(critic, phases, "critic")
    numbers: list[Any] = []
    device: dict[str, int] = {}
    fetched: list[int] = []
    fetch = Residency._fetch

    def counted(self: Residency, berths: Any) -> None:
        coming = list(berths)
        fetched[-1] += sum(berth.size for berth in coming)
        fetch(self, coming)

    Residency._fetch = counted  # type: ignore[method-assign]  # this process ends with the test

    def measured(phase: str) -> None:
        device[phase] = max(device.get(phase, 0), on_device(actor, critic))

    experience = experience_of()
    for _ in range(STEPS):
        fetched += [0]
        phases.rollout()
        measured("rollout")
        numbers.append(values.values(experience.rows))
        measured("score_critic")
        fetched += [0]
        logp = policy.log_probs(experience.rows).logp
        numbers.append(logp)
        measured("score")
        for model, loss, name, given in (
            (values, square_loss, "update_critic", experience),
            (policy, policy_loss(), "update", experience_of_policy(logp)),
        ):
            fetched += [0]
            metrics = model.step(given, loss)  # type: ignore[attr-defined]
            numbers.append((metrics["loss"], metrics["grad_norm"]))
            measured(name)
        phases.push()
        measured("push")
        numbers += [shard.tensor.clone() for shard in actor.frozen_shards()]
    models = models_of(config, auto="float32", narrow_whole=False)
    stages = dict.fromkeys(models, actor.topology.pipeline_rank)
    predicted = resident(models, config, world.size, stages)
    homes = {
        berth.home.untyped_storage()._cdata: berth.home.untyped_storage()
        for residency in held.values()
        for berth in residency._berths.values()
        if berth.home is not None
    }
    packed = sum(each.nbytes for model in (actor, critic) for each in model.manager._packed)
    return Told(
        numbers,
        device,
        packed + sum(storage.nbytes() for storage in homes.values()),
        {phase: sum(parts.values()) for phase, parts in predicted.items()},
        on_host(models, config, world.size, stages).get("offload", 0),
        sum(parameter.nbytes for parameter in frozen_of(critic)),
        fetched,
    )


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", beside(SHARED, QUICK))
def test_a_critic_on_the_policys_weights_has_the_numbers_of_one_with_its_own_and_no_second_copy(
    name: str, tmp_path: Path
) -> None:
    assert_one_copy(tmp_path, LAYOUTS[name])


def assert_one_copy(tmp_path: Path, case: Case, *, preloaded: str = LOCAL) -> None:
    """Compares a critic on the policy's weights, while models take turns, with one on its own."""
    folder = save_tiny(tmp_path, "qwen3")
    shared, own = (
        run_ranks(case[0], turns_body, folder, case, share, True, "bfloat16", preloaded=preloaded)
        for share in (True, False)
    )
    for ours, theirs in zip(shared, own, strict=True):
        for mine, other in zip(ours.numbers, theirs.numbers, strict=True):
            assert_same(mine, other)
        assert ours.base > 100_000
        assert ours.device["rollout"] == 0
        assert ours.device == theirs.device, "at most one of them is there"
        assert theirs.host - ours.host == pytest.approx(ours.base, rel=0.02)  # homes are aligned
        for number, (less, more) in enumerate(zip(ours.fetched, theirs.fetched, strict=True)):
            # the first turn of a step comes after a rollout, which leaves nothing on the device
            saved = ours.base if number % 4 else 0
            assert more - less == saved, "the frozen weights went to the host between two turns"
        for phase, size in ours.device.items():
            assert size == pytest.approx(ours.predicted[phase], rel=0.1), phase
        assert ours.host == pytest.approx(ours.predicted_host, rel=0.1)


@pytest.mark.ranks
def test_a_base_of_8_bits_on_the_host_is_there_once_and_is_the_same_for_both(
    tmp_path: Path,
) -> None:
    folder, case = save_tiny(tmp_path, "qwen3"), LAYOUTS["TP2, SP"]
    shared, own = (
        run_ranks(case[0], turns_body, folder, case, share, True, "bfloat16", "int8")
        for share in (True, False)
    )
    for ours, theirs in zip(shared, own, strict=True):
        for mine, other in zip(ours.numbers, theirs.numbers, strict=True):
            assert_same(mine, other)
        assert ours.device["rollout"] == 0
        assert ours.host == pytest.approx(ours.predicted_host, rel=0.1)
        assert ours.base / 2 < theirs.host - ours.host < 0.8 * ours.base


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen2-tied", "PP2 x VPP2"),
        pytest.param("qwen3-moe", "CP2", marks=pytest.mark.ranks),
    ],
)
def test_where_nothing_leaves_the_device_it_holds_the_frozen_weights_once(
    variant: str, name: str, tmp_path: Path
) -> None:
    folder, case = save_tiny(tmp_path, variant), LAYOUTS[name]
    shared, own = (
        run_ranks(case[0], turns_body, folder, case, share, False, "float32")
        for share in (True, False)
    )
    for ours, theirs in zip(shared, own, strict=True):
        for mine, other in zip(ours.numbers, theirs.numbers, strict=True):
            assert_same(mine, other)
        for phase, size in ours.device.items():
            assert theirs.device[phase] - size == ours.base, phase
        assert ours.host == theirs.host == 0
        assert ours.device["update"] == pytest.approx(ours.predicted["update"], rel=0.1)


def places_body(world: Any, folder: Path, case: Case, change: str) -> bool:
    """Whether the critic's frozen weights are the policy's own."""
    config = run_config(folder, case, "float32")
    backend = MegatronBackend()
    actor = backend.policy(config)
    model = replace(config.model, lora=replace(config.model.lora, path=""))
    own = replace(config, model=model)
    if change == "layout":
        own = replace(own, parallel=replace(own.parallel, tensor=1))
    if change == "folder":
        own = replace(own, model=replace(model, path=str(save_tiny(folder / "other", "qwen3"))))
    critic = backend.value_model(own, role="critic")
    policys = {id(parameter) for parameter in frozen_of(actor)}
    return all(id(parameter) in policys for parameter in frozen_of(critic))


@pytest.mark.parametrize(("change", "shares"), [("", True), ("layout", False), ("folder", False)])
def test_of_another_folder_or_layout_a_critic_has_weights_of_its_own(
    change: str, shares: bool, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    assert run_ranks(2, places_body, folder, LAYOUTS["TP2"], change) == [shares, shares]
