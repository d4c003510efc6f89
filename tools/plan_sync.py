"""Plans the push of a model's weights from a trainer's layout into engines, without running them:
prints bytes per rank and the limiting link.

    rftmega plan-sync HF_DIR --trainer-ranks 64 --tp 4 --pp 2 --engine-ranks 32 --engine-tp 8
    [--separate]

HF_DIR needs only a config.json. Seconds are a lower bound: the bytes of the busiest rank divided by
the bandwidth of its link.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

from rftmega.core.errors import exit_code_of

SIZES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual pipeline",
    "ep": "expert",
    "etp": "expert tensor",
}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="HF_DIR")
    parser.add_argument("--trainer-ranks", type=int, required=True, metavar="N")
    for flag, meaning in SIZES.items():
        parser.add_argument(
            f"--{flag}",
            type=int,
            default=1,
            metavar="N",
            help=f"{meaning} parallel size of the trainer (1)",
        )
    parser.add_argument("--first-stage-layers", type=int, default=0, metavar="N")
    parser.add_argument("--last-stage-layers", type=int, default=0, metavar="N")
    parser.add_argument(
        "--engine-ranks",
        type=int,
        metavar="N",
        help="ranks of all engines together (the trainer's)",
    )
    parser.add_argument(
        "--engine-tp", type=int, default=1, metavar="N", help="ranks of one engine (1)"
    )
    parser.add_argument(
        "--engine-ep", action="store_true", help="an engine's ranks hold whole experts"
    )
    parser.add_argument(
        "--separate",
        action="store_true",
        help="engines on ranks of their own (default: on the trainer's)",
    )
    parser.add_argument(
        "--bytes", type=int, default=2, choices=[1, 2, 4], metavar="N", help="bytes a weight (2)"
    )
    parser.add_argument("--node", type=int, default=8, metavar="N", help="ranks a node (8)")
    parser.add_argument(
        "--nvlink",
        type=float,
        default=450.0,
        metavar="GB/S",
        help="a rank's bandwidth within a node (450)",
    )
    parser.add_argument(
        "--nic",
        type=float,
        default=50.0,
        metavar="GB/S",
        help="a rank's bandwidth between nodes (50)",
    )
    chosen = parser.parse_args(given)
    warnings.filterwarnings("ignore")
    return exit_code_of(show, chosen)


def show(chosen: argparse.Namespace) -> int:
    from collections import defaultdict

    from tqdm import tqdm

    from rftmega.config import ParallelConfig
    from rftmega.converters import table
    from rftmega.core.errors import ConfigError
    from rftmega.model_providers.description import describe, layout_violations
    from rftmega.model_providers.hf_config import read_hf_config
    from rftmega.run.planning.push_buffers import DTYPES
    from rftmega.run.planning.push_plan import Engines, placements
    from rftmega.weights.plan import Balance, spread

    hf_config = read_hf_config(chosen.folder)
    model = describe(hf_config)
    parallel = ParallelConfig(
        tensor=chosen.tp, sequence=chosen.tp > 1, pipeline=chosen.pp, virtual_pipeline=chosen.vpp, expert=chosen.ep,
        expert_tensor=chosen.etp, first_stage_layers=chosen.first_stage_layers, last_stage_layers=chosen.last_stage_layers,
    )  # fmt: skip
    world = chosen.trainer_ranks
    engines = Engines(chosen.engine_ranks or world, chosen.engine_tp, chosen.engine_ep)
    problems = layout_violations(model, parallel)
    if world % (parallel.tensor * parallel.pipeline):
        problems.append(
            f"--trainer-ranks {world} is not a multiple of --tp {chosen.tp} x --pp {chosen.pp}."
        )
    if engines.ranks % engines.tensor:
        problems.append(
            f"--engine-ranks {engines.ranks} is not a multiple of --engine-tp {engines.tensor}."
        )
    if not chosen.separate and engines.ranks != world:
        problems.append(
            f"--engine-ranks {engines.ranks} on {world} trainer ranks: colocated engines need all of them. Or --separate."
        )
    if problems:
        raise ConfigError.listing("This can't be planned", problems)
    begin = time.perf_counter()
    plan = Balance()
    # link -> direction of a rank -> bytes
    links: dict[str, dict[int, int]] = {"NVLink": defaultdict(int), "NIC": defaultdict(int)}
    messages = 0
    total = len(table(hf_config)) * model.layers
    everything = placements(
        table(hf_config),
        model,
        parallel,
        world,
        engines,
        colocated=not chosen.separate,
        dtype=lambda rule: DTYPES[chosen.bytes],
    )
    for _, tensor, needs in tqdm(
        everything, total=None if model.experts else total, unit="tensor", file=sys.stderr
    ):
        for transfer in plan.transfers(tensor, needs):
            link = links[
                "NVLink"
                if transfer.source // chosen.node == transfer.target // chosen.node
                else "NIC"
            ]
            link[2 * transfer.source] += transfer.slice.bytes
            link[2 * transfer.target + 1] += transfer.slice.bytes
            messages += 1
    say = sys.stdout.write
    weights = model.parameters * chosen.bytes
    say(f"model       {model.family}, {model.parameters:,} parameters, {weights / 1e9:,.1f} GB\n")
    say(
        f"moved       {plan.moved / 1e9:,.1f} GB in {messages:,} slices: every rank's needs less what it holds\n"
    )
    first = 0 if not chosen.separate else world
    senders, receivers = range(world), range(first, first + engines.ranks)
    most_sent, most_received = (
        max(side.values(), default=0) / 1e9 for side in (plan.sent, plan.received)
    )
    say(
        f"a rank      sends at most {most_sent:,.2f} GB ({spread(plan.sent, senders):.2f} of the mean), "
    )
    say(f"gets at most {most_received:,.2f} GB ({spread(plan.received, receivers):.2f})\n")
    speed = {"NVLink": chosen.nvlink, "NIC": chosen.nic}
    seconds = {
        name: max(link.values(), default=0) / 1e9 / speed[name] for name, link in links.items()
    }
    binds = max(seconds, key=lambda name: seconds[name])
    for name, took in seconds.items():
        say(f"{name:<11} {took:,.3f} s at least, at {speed[name]:g} GB/s\n")
    say(
        f"bound       {seconds[binds]:,.3f} s; {binds} binds\n"
        if plan.moved
        else "bound       nothing moves\n"
    )
    say(f"planned in  {time.perf_counter() - begin:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
