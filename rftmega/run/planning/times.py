"""Computes a lower bound of the seconds of each phase: work over compute speed, and bytes over link
bandwidth.

This is a roofline (Williams et al. 2009): launches take no time, every kernel reaches full speed,
and the load is even everywhere. Real runs take longer; use it to compare layouts, or a measured
phase with its bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rftmega.backends.runner.flops import BACKWARD, OF_FROZEN, forward_flops
from rftmega.config import RolloutConfig, RunConfig
from rftmega.model_providers.description import ModelDescription, stage_layers
from rftmega.run.planning import data_plane, engine, sharded
from rftmega.run.planning.memory import Cache, load_of, rows_of
from rftmega.run.planning.models import (
    ADAM,
    GRADIENTS,
    MAIN_PARAMETERS,
    PARAMETERS,
    POLICY,
    PlannedModel,
)
from rftmega.run.planning.push_buffers import Push
from rftmega.run.planning.states import sharers, states


@dataclass(frozen=True)
class Speeds:
    """Speeds holds the rates of one device: floating-point operations per second (`flops`), bytes
    per second of its memory, of NVLink, of the network card (`nic`) and of the link to the host;
    and the number of devices per node.
    """

    flops: float
    memory: float
    nvlink: float
    nic: float
    host: float
    node: int
    token: float = 250e-9  # seconds of a CPU core per token between engines and micro-batches

    def link(self, neighbours: int) -> float:
        """Returns the bandwidth (bytes per second) within a group of processes that spans
        `neighbours` consecutive ranks.
        """
        return self.nvlink if neighbours <= self.node else self.nic


def seconds(
    models: Mapping[str, PlannedModel],
    config: RunConfig,
    world: int,
    cache: Cache | None,
    push: Push | None,
    speeds: Speeds,
) -> dict[str, dict[str, float]]:
    """Returns phase -> resource (such as "compute" or "NIC") -> seconds of a step with completions
    of maximum length.

    `world`: number of trainer processes; `cache`: the KV cache of an engine, None omits the rollout
    phase; `push`: the cost of a weight push, None omits the push phase.
    """
    found: dict[str, dict[str, float]] = {}
    length = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if cache is not None:
        found["rollout"] = _generating(models[POLICY], config, world, cache, speeds)
    for name, planned in models.items():
        suffix = "" if name == POLICY else f"_{name}"
        forward = (
            forward_flops(planned.model, [length], value_head=planned.value)
            * rows_of(config)
            * _computed(config, planned, world)
            / world
            / speeds.flops
        )
        if config.algorithm.task == "rl":
            passes = 1
            if name == POLICY:  # its own, unless the update computes them, and the reference's
                passes = (not config.late_scoring) + (config.algorithm.kl.coef > 0)
            found[f"score{suffix}"] = {"compute": forward * passes}
            if planned.groups is not None:
                load = load_of(config, planned.parallel, world)
                times = passes * load.micro_batches * config.algorithm.updates_per_epoch
                gathers = times * _gather(planned, world, speeds)
                found[f"score{suffix}"]["gathers"] = max(0.0, gathers - forward * passes)
        if config.algorithm.scores_mismatched:
            found["score"] = {"compute": forward}
        if planned.optimizer is not None:
            found[f"update{suffix}"] = _learning(planned, config, world, forward, speeds)
    if config.algorithm.task == "rl" and config.trainer.offload and not config.parallel.cpu_offload:
        held = states(models[POLICY], world, 0)
        both_ways = held[PARAMETERS] + held[MAIN_PARAMETERS] + held[ADAM]
        found["update"]["offload"] = 2 * both_ways / speeds.host
    if config.algorithm.task == "rl":
        hosts = -(-world // speeds.node)
        found["data"] = data_plane.seconds(config, hosts, nic=speeds.nic, token=speeds.token)
    if push is not None:
        moved = {True: 0, False: 0}
        for (source, target), size in push.sent.items():
            moved[source // speeds.node == target // speeds.node] += size
        each = {near: size / push.share / world for near, size in moved.items()}
        found["push"] = {"NVLink": each[True] / speeds.nvlink, "NIC": each[False] / speeds.nic}
    return found


def _computed(config: RunConfig, planned: PlannedModel, world: int) -> float:
    """Returns the share of a step's tokens that a forward pass computes if the completions of a
    prompt share its computation (trainer.share_prefixes), which Transformer Engine's attention
    doesn't support; prompts and completions have maximum length.
    """
    rollout, parallel = config.rollout, planned.parallel
    by_megatron = planned.groups is None
    if not config.trainer.share_prefixes or config.algorithm.task != "rl" or by_megatron:
        return 1.0
    rows = rows_of(config) / config.algorithm.updates_per_epoch * parallel.tensor / world
    completions = config.rollout.train_samples_per_prompt or rollout.samples_per_prompt
    together = max(1.0, min(completions, rows))  # of one prompt, on one rank
    whole = together * (rollout.max_prompt_tokens + rollout.max_response_tokens)
    return (rollout.max_prompt_tokens + together * rollout.max_response_tokens) / whole


def _generating(
    policy: PlannedModel, config: RunConfig, world: int, cache: Cache, speeds: Speeds
) -> dict[str, float]:
    """Returns kind of work (such as "decode") -> seconds that one engine takes for its share of a
    step's completions.

    The engine batches completions as far as its KV cache and rollout.max_batch allow. `world`:
    number of trainer processes.
    """
    ranks, rollout = config.rollout.tensor, config.rollout
    engines = rollout.servers if config.strategy == "separate" else world // ranks
    prompts = config.trainer.prompts_per_step / engines
    return generated(policy, config, prompts, cache, speeds).busy


@dataclass(frozen=True)
class Generated:
    """Generated holds the times of one engine for its share of a step's completions."""

    busy: dict[str, float]  # seconds by kind
    longest: float  # seconds of a completion of maximum length, from start to end


def generated(
    policy: PlannedModel,
    config: RunConfig,
    prompts: float,
    cache: Cache,
    speeds: Speeds,
    *,
    under_way: int = 1,
    mean_length: float = 1.0,
) -> Generated:
    """Returns the times in which one engine generates the completions of `prompts` prompts.

    `under_way`: number of steps whose completions are in flight at once; `mean_length`: mean
    completion length, as a share of the maximum.
    """
    ranks, rollout, model = config.rollout.tensor, config.rollout, policy.model
    completions = prompts * rollout.samples_per_prompt
    together = max(1.0, min(completions * under_way, rollout.max_batch, cache.sequences))
    rounds = completions / together
    length = rollout.max_response_tokens * mean_length
    middle = rollout.max_prompt_tokens + length / 2
    a_token = forward_flops(model, [1]) / ranks
    read = _read(policy, rollout, together) + together * middle * engine.cache_bytes(model, ranks)
    exchanged = 2 * model.layers * together * model.hidden * 2 * 2 * (ranks - 1) / ranks
    prefill = forward_flops(model, [rollout.max_prompt_tokens]) / ranks / speeds.flops
    decode = max(read / speeds.memory, together * a_token / speeds.flops)
    exchange = exchanged / speeds.link(ranks)
    return Generated(
        {
            "prefill": prefill * prompts,
            "decode": rounds * length * decode,
            "tensor exchange": rounds * length * exchange,
        },
        prefill + rollout.max_response_tokens * (decode + exchange),
    )


def _read(policy: PlannedModel, rollout: RolloutConfig, tokens: float) -> float:
    """Returns the bytes of weights that an engine process reads in a decoding step of `tokens`
    sequences: of routed experts, only those that a token is expected to be sent to.
    """
    whole, model = engine.held_bytes(policy, rollout), policy.model
    if model.experts is None:
        return whole
    size = 2 if rollout.quantization == "none" else engine.FP8_BYTES
    experts = len(model.experts.layers) * model.experts.number
    routed = experts * 3 * model.hidden * model.experts.ffn * size / rollout.tensor
    met = 1 - (1 - model.experts.active / model.experts.number) ** tokens
    return whole - routed * (1 - met)


def _learning(
    planned: PlannedModel, config: RunConfig, world: int, forward: float, speeds: Speeds
) -> dict[str, float]:
    model, parallel, optimizer = planned.model, planned.parallel, planned.optimizer
    assert optimizer is not None
    load = load_of(config, parallel, world)
    again = 1 if parallel.recompute == "full" else 0
    backward = OF_FROZEN if config.model.lora.rank else BACKWARD
    compute = forward * (1 + backward + again) * config.algorithm.epochs_per_rollout
    # per process
    tokens = (
        load.tokens * load.micro_batches * config.algorithm.steps_per_rollout / parallel.context
    )
    found = {"compute": compute}
    if parallel.tensor > 1:
        found["tensor exchange"] = _summed(planned, (2 + again) * tokens, speeds)
    if planned.groups is not None:
        return found | _exchanged(planned, config, world, compute, speeds)
    stage = world // parallel.pipeline
    if parallel.pipeline > 1:
        found["bubble"] = (
            compute * (parallel.pipeline - 1) / parallel.virtual_pipeline / load.micro_batches
        )
        stages = stage_layers(model.layers, parallel)
        largest = max(sum(map(len, chunks)) for chunks in stages)
        found["uneven stages"] = compute * (largest * parallel.pipeline / model.layers - 1)
    if parallel.expert > 1:
        found["experts' exchange"] = (
            (4 + 2 * again) * _routed(model, planned, tokens) * (1 - 1 / parallel.expert)
        ) / speeds.link(parallel.expert * parallel.expert_tensor)
    held, shared_by = states(planned, world, 0), sharers(planned, world)[0]
    if shared_by > 1:
        shards = optimizer.shards_states(max(sharers(planned, world)))
        reduced = held[GRADIENTS] * (1 if shards else 2) + (held[PARAMETERS] if shards else 0)
        found["gradients"] = (
            reduced * (1 - 1 / shared_by) * config.algorithm.steps_per_rollout / speeds.link(stage)
        )
    return found


def _summed(planned: PlannedModel, tokens: float, speeds: Speeds) -> float:
    """Returns the seconds of the tensor-parallel all-reduces of two outputs per layer, over
    `tokens` tokens; a token counts again for each further pass (backward, recomputed forward).
    """
    model, t = planned.model, planned.parallel.tensor
    reduced = 2 * model.layers / planned.parallel.pipeline * tokens * model.hidden
    return reduced * planned.itemsize * 2 * (t - 1) / t / speeds.link(t)


def _exchanged(
    planned: PlannedModel, config: RunConfig, world: int, compute: float, speeds: Speeds
) -> dict[str, float]:
    """Returns "gathers": the seconds of FSDP2's gathers and reductions that are not hidden by
    `compute` seconds of computation; and with parameters on the host "host": the seconds of copies
    to and from the host. `world`: number of trainer processes.
    """
    assert planned.groups is not None
    parallel, steps = planned.parallel, config.algorithm.steps_per_rollout
    shards = sharded.shards_of(planned, world)
    held = sharded.elements_of(planned.groups, shards)
    trained = sharded.trained_of(planned.groups, shards)
    passes = load_of(config, parallel, world).micro_batches * steps
    gathers = passes * (2 if parallel.reshard_after_forward else 1)
    reduced = sharded.FLOAT * trained * (shards - 1) / speeds.link(shards * parallel.tensor)
    replicas = parallel.replicas
    averaged = 2 * sharded.FLOAT * trained * (replicas - 1) / replicas / speeds.link(world)
    whole = gathers * _gather(planned, world, speeds) + passes * reduced + steps * averaged
    found = {"gathers": max(0.0, whole - compute)}
    if parallel.cpu_offload:
        found["host"] = sharded.FLOAT * (held * gathers + trained * passes) / speeds.host
    return found


def _gather(planned: PlannedModel, world: int, speeds: Speeds) -> float:
    """Returns the seconds that a process takes to gather the model's other shards once. `world`:
    number of trainer processes.
    """
    assert planned.groups is not None
    shards = sharded.shards_of(planned, world)
    held = sharded.elements_of(planned.groups, shards) + sharded.pairs_of(planned.groups, shards)
    link = speeds.link(shards * planned.parallel.tensor)
    return planned.itemsize * held * (shards - 1) / link


def _routed(model: ModelDescription, planned: PlannedModel, tokens: float) -> float:
    """Returns the bytes that one process sends to experts for `tokens` tokens in one direction
    (dispatch or combine).
    """
    assert model.experts is not None
    parallel = planned.parallel
    layers = len(model.experts.layers) / parallel.pipeline
    return (
        layers * tokens / parallel.tensor * model.experts.active * model.hidden * planned.itemsize
    )
