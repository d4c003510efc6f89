"""Predicts a run before its launch: memory of every process in every phase, what does not fit, and
the nearest layout that does.

    rftmega plan CONFIG [option=value ...] --gpus 64 --gpu-memory 80
    rftmega plan examples/planning/llama-3-70b/run.yaml --gpus 64 --gpu-memory 80 --json

CONFIG is the config file of rftmega train; the folder model.path needs only a config.json. No GPU,
weights, data or processes are needed. GB are 10^9 bytes.

Phases are those of a run's metrics: rollout (engines generate), score (log-probs, no gradient),
update (training), push (weight sync to the engines); and data (rollouts move from the engines to
the micro-batches). All sequences have the maximum length, and routing to experts is balanced: the
worst case of memory except for a skewed router. Kinds:
  parameters, gradients, main_parameters, adam    as Megatron's buffers contain them, with padding
  activations    stored for the backward pass, and the working memory of a layer (arXiv:2205.05198) or, on the last stage,
                 of the LM head (logits of 1024 tokens at a time, gradient of its weight); batches on the device
  gathered       of FSDP2: whole layers while they compute, and communication buffers
  tower          activations of a vision encoder, on the first stage, if prompts consist only of images
  engine_weights, engine_working, kv_cache    of vLLM: it takes rollout.memory_fraction of a device, the cache what is left
  push_buffers   messages of two buckets (trainer.push_bucket_mib), simulated
  reserved       --reserved-gb: CUDA's context, NCCL, allocator fragmentation
Host copies per process: reference (algorithm.kl.coef), average (ema_beta), checkpoint (the buffer
for saving), offload, sharded (parallel.cpu_offload). Shared by all processes of a host: rollout (a
step's tokens and their data), at_work (while the log-prob mismatch is computed), teachers (what
they say of a step's tokens), replay.

Seconds are a roofline, a lower bound: work over speed, with completions of maximum length and all
devices in step.

At the end it recommends a backend, by searching the quickest layout of each that fits, unless
--no-search is given.

With --splits, for a run with strategy=separate, it compares instead how to divide the devices
between the trainer and servers: parallel.* and rollout.tensor stay, the data-parallel size and
rollout.servers vary. A synchronous step takes rollout + update, a one-step off-policy step the
longer of both. With trainer.max_staleness=k a step takes the longest of: update; the servers' time
for a step's completions while those of k + 1 steps are in flight; the time of the longest
completion divided by k + 1.

The exit code is 0 if everything fits, 1 if not, 2 if the run can't be planned.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.config.capabilities import backend_of
from rftmega.config.options.teachers import names_of
from rftmega.config.teacher_config import config_of
from rftmega.core.errors import ConfigError, exit_code_of
from rftmega.run.hub import fetched
from rftmega.run.option_parser import OptionParser
from rftmega.run.planning import usual_device

if TYPE_CHECKING:
    from rftmega.run.planning.backends import Recommendation
    from rftmega.run.planning.fit import Machine, Misfit
    from rftmega.run.planning.models import PlannedModel
    from rftmega.run.planning.search import Proposal

GB = 1e9
KINDS = (
    *("parameters", "gradients", "main_parameters", "adam"),
    *("gathered", "activations", "tower"),
    *("engine_weights", "engine_working", "kv_cache", "push_buffers", "reserved"),
)
WIDTH = 100  # columns
SHOWN = 8  # layouts that don't fit
FLAGS = (
    ("--reserved-gb", usual_device.RESERVED_GB, "of each device that is nobody's"),
    ("--host-memory", 0.0, "GB of a node's host memory; 0: not looked at"),
    ("--tflops", usual_device.TFLOPS, "of a device, dense, in the training dtype"),
    ("--hbm-gbs", usual_device.HBM_GBS, "GB/s of a device's memory"),
    ("--nvlink-gbs", usual_device.NVLINK_GBS, "GB/s of a device within a node, one way"),
    ("--nic-gbs", usual_device.NIC_GBS, "GB/s of a device between nodes, one way"),
    ("--pcie-gbs", usual_device.PCIE_GBS, "GB/s between a device and its host, one way"),
    ("--mean-length", 0.5, "of --splits, assumed: mean answer over rollout.max_response_tokens"),
    ("--token-ns", 250.0, "ns of a core for each token of a step's rollouts (docs/results.md)"),
)


def main(given: list[str] | None = None) -> int:
    parser = OptionParser(
        description=__doc__,
        usage="%(prog)s CONFIG [option=value ...] --gpus N --gpu-memory GB [--json] [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="option=value", default=[], help="as of rftmega train"
    )
    add_machine(parser)
    parser.add_argument(
        "--no-search", action="store_true", help="say what does not fit, propose nothing"
    )
    parser.add_argument(
        "--splits", action="store_true", help="compare splits between trainer and servers"
    )
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    return exit_code_of(show, parser.parse_intermixed_args(given))


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line options that describe the devices."""
    parser.add_argument(
        "--gpus",
        type=int,
        required=True,
        metavar="N",
        help="devices in all, those of separate servers too",
    )
    parser.add_argument("--gpu-memory", type=float, required=True, metavar="GB", help="of each")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="devices that NVLink joins (8)"
    )
    for flag, default, meaning in FLAGS:
        parser.add_argument(
            flag, type=float, default=default, metavar="X", help=f"{meaning} ({default:g})"
        )


def machine_of(chosen: argparse.Namespace) -> "Machine":
    """Returns the machine that `add_machine`'s options describe. Raises ConfigError if they are
    invalid.
    """
    from rftmega.run.planning.fit import Machine
    from rftmega.run.planning.memory import Budget
    from rftmega.run.planning.times import Speeds

    if chosen.gpus < 1 or chosen.gpus_per_node < 1 or chosen.gpu_memory <= chosen.reserved_gb:
        raise ConfigError(
            "--gpus and --gpus-per-node must be at least 1, and --gpu-memory more than --reserved-gb."
        )
    hbm, nvlink, nic, pcie = (
        GB * x for x in (chosen.hbm_gbs, chosen.nvlink_gbs, chosen.nic_gbs, chosen.pcie_gbs)
    )
    if min(chosen.tflops, hbm, nvlink, nic, pcie) <= 0:
        raise ConfigError("--tflops and all bandwidths must be positive.")
    return Machine(
        chosen.gpus,
        Budget(chosen.gpu_memory * GB, chosen.reserved_gb * GB),
        Speeds(
            chosen.tflops * 1e12,
            hbm,
            nvlink,
            nic,
            pcie,
            chosen.gpus_per_node,
            chosen.token_ns * 1e-9,
        ),
        chosen.host_memory * GB,
    )


def show(chosen: argparse.Namespace) -> int:
    from rftmega.run.planning.backends import recommended
    from rftmega.run.planning.fit import misfits, refused
    from rftmega.run.planning.models import models_of
    from rftmega.run.planning.search import Found, found_layout
    from rftmega.tools.plan_splits import show_splits

    begin = time.perf_counter()
    machine = machine_of(chosen)
    config = fetched(configuration.load(chosen.config, chosen.overrides), weights=False)
    models = models_of(config)
    if chosen.splits:
        return show_splits(
            models, config, machine, mean_length=chosen.mean_length, as_json=chosen.json
        )
    if problems := refused(models, config, machine):
        raise ConfigError.listing("This can't be planned", problems)
    found = figures(models, config, machine)
    reasons = misfits(models, config, machine, found["push_buffers"])
    looked = Found()
    if reasons and not chosen.no_search:
        looked = found_layout(models, config, machine, "nearest")
    proposal = looked.proposal
    rejected = [(changes, misfit) for changes, misfit in looked.rejected if changes]
    found |= {"misfits": [reason.reason for reason in reasons], "proposal": None}
    if proposal is not None:
        found["proposal"] = {
            "changes": dict(proposal.changes),
            "seconds_at_least": proposal.seconds,
        }
    recommendation = None if chosen.no_search else recommended(config, machine)
    found["recommended"] = recommendation and {
        "backend": recommendation.backend,
        "why": recommendation.why,
        "best": {
            backend: {"changes": best.changes(config), "seconds": best.seconds}
            for backend, best in recommendation.best.items()
        },
    }
    found["seconds_to_plan"] = time.perf_counter() - begin
    if chosen.json:
        found["rejected"] = [
            {"changes": dict(changes), "reason": why.reason} for changes, why in rejected
        ]
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        said = [*table(found), *verdict(reasons, proposal, rejected)]
        if recommendation is not None:
            said += advice(recommendation, config)
        sys.stdout.write("\n".join([*said, ""]))
    return 1 if reasons else 0


def figures(
    models: Mapping[str, "PlannedModel"], config: RunConfig, machine: "Machine"
) -> dict[str, Any]:
    """Returns the predictions for a run by name, as `--json` prints them. `models`: the run's
    models by name.
    """
    from rftmega.run.planning.data_plane import on_each_host
    from rftmega.run.planning.fit import stages_of
    from rftmega.run.planning.memory import cache_of, load_of, on_device, on_host
    from rftmega.run.planning.models import POLICY
    from rftmega.run.planning.push_buffers import push_of, sampled
    from rftmega.run.planning.states import sharers
    from rftmega.run.planning.times import seconds
    from rftmega.runtime.parallel.layout import nodes_of_engine

    world, policy, rl = machine.trainers(config), models[POLICY], config.algorithm.task == "rl"
    asked = config.algorithm.teachers
    teachers = {
        name: config_of(config, teacher)
        for name, teacher in zip(names_of(asked), asked, strict=True)
        if teacher.loads
    }
    parallel = config.parallel
    push = cache = None
    if rl:
        cache = cache_of(policy, config, machine.budget)
    if rl and config.strategy == "colocated":
        bucket = config.trainer.push_bucket_mib * 2**20
        push = push_of(
            policy, world, config.rollout.tensor, bucket, layers=sampled(policy.model, world)
        )
    buffers = max(push.buffers) if push else 0
    stages = stages_of(models, world)
    load = load_of(config, parallel, world)
    return {
        "model": {"family": policy.model.family, "parameters": policy.model.parameters},
        "backend": config.backend,
        "layout": layout(config, world),
        "teachers": {
            name: f"backend {own.backend}, {layout(own, world)}" for name, own in teachers.items()
        },
        "recompute": parallel.recompute,
        "distributed_optimizer": backend_of(config).layouts
        and config.optimizer.shards_states(max(sharers(policy, world))),
        "cpu_offload": parallel.cpu_offload,
        "offload": rl and config.trainer.offload,
        "processes": world,
        "memory": machine.budget.memory,
        "micro_batch_tokens": load.tokens,
        "micro_batches": load.micro_batches,
        "engine": cache
        and {
            "processes": config.rollout.tensor,
            "nodes": nodes_of_engine(config.rollout.tensor, machine.speeds.node),
            "full_answers_at_once": cache.sequences,
        },
        "stages": [
            on_device(models, config, world, place, machine.budget, buffers) for place in stages
        ],
        "host": [on_host(models, config, world, place) for place in stages],
        "each_host": on_each_host(config, policy.model.experts, models),
        "push_buffers": buffers,
        "seconds_at_least": seconds(models, config, world, cache, push, machine.speeds),
    }


def layout(config: RunConfig, world: int) -> str:
    """Returns a text that describes the trainer's layout on `world` processes."""
    from rftmega.runtime.parallel.layout import layout_name

    parallel = config.parallel
    if not backend_of(config).layouts:
        stage = 3 if parallel.reshard_after_forward else 2
        return f"{parallel.replicas} replica(s) of FSDP over {world // parallel.replicas}, ZeRO-{stage}"
    return layout_name(parallel, world // (parallel.tensor * parallel.context * parallel.pipeline))


def advice(recommendation: "Recommendation", config: RunConfig) -> list[str]:
    """Returns the lines of text that recommend a backend for `config`, with the reason and the best
    layout of each backend.
    """
    name, why = recommendation.backend, recommendation.why
    said = ["", *textwrap.wrap(f"Recommended: backend={name}: {why}" if name else why, WIDTH)]
    for backend, best in recommendation.best.items():
        changes = best.changes(config)
        if changes is not None:
            options = _options(changes) or "as it is"
            line = f"  {backend}, at least {_s(best.seconds)} s a step: {options}"
            said += textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return said


def table(found: dict[str, Any]) -> list[str]:
    """Returns the predictions `found`, made by `figures`, as lines of at most 100 columns."""
    stages, memory, engine = found["stages"], found["memory"], found["engine"]
    phases = list(stages[0])
    switches = [f"recompute {found['recompute']}"]
    switches += [
        name.replace("_", " ")
        for name in ("distributed_optimizer", "offload", "cpu_offload")
        if found[name]
    ]
    said = [
        f"model    {found['model']['family']}, {found['model']['parameters'] / 1e9:.1f} billion parameters",
        f"layout   {found['layout']}, {found['processes']} devices of {memory / GB:g} GB",
        *(f"{name:<8} {told}" for name, told in found["teachers"].items()),
        f"with     {', '.join(switches)}",
        f"update   {found['micro_batches']} micro-batches of {found['micro_batch_tokens']} tokens a data-parallel rank and step",
    ]
    if engine:
        over = f" over {engine['nodes']} nodes" if engine["nodes"] > 1 else ""
        said.append(
            f"engine   {engine['processes']} device(s){over}; room for {engine['full_answers_at_once']:.0f} full answers at once"
        )
    fullest = {
        phase: max(range(len(stages)), key=lambda n: sum(stages[n][phase].values()))
        for phase in phases
    }
    present = {
        kind for stage in stages for parts in stage.values() for kind, size in parts.items() if size
    }
    kinds = [kind for kind in KINDS if kind in present]
    said += ["", _row("GB a device of the fullest stage", phases)]
    for kind in kinds:
        said.append(
            _row(f"  {kind}", [_gb(stages[fullest[phase]][phase].get(kind, 0)) for phase in phases])
        )
    totals = {phase: [sum(stage[phase].values()) for stage in stages] for phase in phases}
    said.append(_row("  together", [_gb(max(totals[phase])) for phase in phases]))
    said.append(_row("  left", [f"{(memory - max(totals[phase])) / GB:.1f}" for phase in phases]))
    said.append(_row("  on stage", [str(fullest[phase]) for phase in phases]))
    if len(stages) > 1:
        said += ["", _row("GB together, by stage", phases)]
        for number in range(len(stages)):
            said.append(_row(f"  {number}", [_gb(totals[phase][number]) for phase in phases]))
    host = max(found["host"], key=lambda kinds: sum(kinds.values()))
    named = ", ".join(f"{kind} {size / GB:.1f}" for kind, size in host.items())
    said += ["", f"host     {sum(host.values()) / GB:.1f} GB a process: {named or 'nothing'}"]
    if common := found["each_host"]:
        named = ", ".join(f"{kind} {size / GB:.1f}" for kind, size in common.items())
        said.append(f"         {sum(common.values()) / GB:.1f} GB for all of them: {named}")
    said.append("")
    seconds = found["seconds_at_least"]
    for phase, parts in seconds.items():
        what = ", ".join(f"{name} {_s(value)}" for name, value in parts.items())
        line = f"{phase:<16} at least {_s(sum(parts.values())):>7} s: {what}"
        said += textwrap.wrap(line, WIDTH, subsequent_indent=" " * 36)
    whole = sum(sum(parts.values()) for parts in seconds.values())
    return [
        *said,
        f"{'a step':<16} at least {_s(whole):>7} s; planned in {found['seconds_to_plan']:.1f} s",
        "",
    ]


def verdict(
    reasons: list["Misfit"],
    proposal: "Proposal | None",
    rejected: list[tuple[Mapping[str, Any], "Misfit"]],
) -> list[str]:
    """Returns lines about the reasons why a run does not fit, the proposed layout, and the rejected
    layouts (changes to the config, and the reason why each does not fit), of which the one with the
    smallest excess comes first.
    """
    if not reasons:
        return ["All of it fits."]
    said = ["Does not fit:"]
    for reason in reasons:
        said += textwrap.wrap(f"  - {reason.reason}", WIDTH, subsequent_indent="    ")
    if proposal is not None:
        said += ["", "The nearest that fits:"]
        options = f"  {_options(proposal.changes)}    (a step at least {_s(proposal.seconds)} s)"
        said += textwrap.wrap(options, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    elif rejected:
        said.append("No layout that was looked at fits: take more devices, or larger ones.")
    if rejected:
        said += [
            "",
            f"Looked at with as few changes or fewer, and did not fit ({len(rejected)}; the nearest to it):",
        ]
        for changes, why in sorted(rejected, key=lambda one: one[1].over)[:SHOWN]:
            said.append(_cut(f"  {_options(changes)}: {why.reason}"))
    return said


def _options(changes: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in changes.items()
    )


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _row(label: str, cells: list[str]) -> str:
    width = max(9, (WIDTH - 34) // max(1, len(cells)) if len(cells) > 6 else 9)
    return label.ljust(34) + "".join(cell.rjust(max(width, len(cell) + 1)) for cell in cells)


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if size else "-"


def _s(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


if __name__ == "__main__":
    sys.exit(main())
