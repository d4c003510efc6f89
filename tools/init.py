"""Writes the YAML file of a first run with your model: GRPO, in the quickest layout that fits your
devices, with a description of every option.

    rftmega init Qwen/Qwen3-8B --gpus 8 --gpu-memory 80
    rftmega init ./my-model --gpus 64 --gpu-memory 80 --data tasks.jsonl --response-tokens 8192
    rftmega init --from trl train.py --gpus 8    # translates the options of a script for TRL
    rftmega init --from verl run.sh              # translates the options of a command line for verl

MODEL is a Hugging Face folder, or org/name of the hub; its weights are not read. Without --data, a
small data set of addition problems is written beside the YAML file, so that you can start at once.
Next, estimate the resources of the run, check it without a device, and start it:

    rftmega plan run.yaml --gpus 8 --gpu-memory 80
    rftmega train run.yaml --processes 8 --dry-run
    rftmega train run.yaml --processes 8                        # on one node
    rftmega launch slurm run.yaml --nodes 8 --gpus-per-node 8   # on several
"""

import argparse
import json
import random
import shlex
import sys
import time
from pathlib import Path

from rftmega.config import ModelConfig, RunConfig
from rftmega.core.errors import ConfigError, exit_code_of
from rftmega.run.hub import fetched

TASKS = 256  # addition problems in the file that is written without --data
ASKED = "What is {} + {}? Put the final answer within \\boxed{{}}."
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def main(given: list[str] | None = None) -> int:
    from rftmega.tools import plan

    given = sys.argv[1:] if given is None else given
    if any(word.partition("=")[0] == "--from" for word in given):
        return exit_code_of(translate, _translation().parse_args(given))
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s MODEL --gpus N --gpu-memory GB [--data FILE] [--response-tokens T] [--output FILE] [...]\n"
        "       %(prog)s --from {trl,verl} PROGRAM [--gpus N] [--output FILE]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face folder, or org/name of the hub")
    plan.add_machine(parser)
    add("--data", metavar="FILE", help="tasks with prompt and label, in a format of docs/data.md")
    add("--prompt-tokens", type=int, default=1024, metavar="T", help="of the longest prompt (1024)")
    add("--response-tokens", type=int, default=2048, metavar="T", help="of a completion (2048)")
    add("--output", type=Path, default=Path("run.yaml"), metavar="FILE", help="to write (run.yaml)")
    return exit_code_of(write, parser.parse_args(given))


def write(chosen: argparse.Namespace) -> int:
    from rftmega.run.first_run import as_yaml, first_run
    from rftmega.tools import plan

    begin = time.perf_counter()
    if chosen.prompt_tokens < 1 or chosen.response_tokens < 1:
        raise ConfigError("--prompt-tokens and --response-tokens must be at least 1.")
    target: Path = chosen.output.absolute()
    tasks = target.with_name(f"{target.stem}_tasks.jsonl")
    data = Path(chosen.data).absolute() if chosen.data else tasks
    for path in (target, *(() if chosen.data else (tasks,))):
        if path.exists():
            raise ConfigError(f"{path} is there already. Move it away, or choose another --output.")
    if chosen.data and not data.exists():
        raise ConfigError(f"--data {chosen.data} is not there.")
    machine = plan.machine_of(chosen)
    described = fetched(RunConfig(model=ModelConfig(path=chosen.model)), weights=False).model.path
    if not (Path(described) / "config.json").is_file():
        raise ConfigError(
            f"{chosen.model} is no folder with a config.json, and no org/name of the hub. Give one of these as MODEL."
        )
    config, best = first_run(
        described,
        machine,
        prompt_tokens=chosen.prompt_tokens,
        response_tokens=chosen.response_tokens,
        train=str(data),
        chat_template=_has_template(Path(described)),
    )
    local = Path(chosen.model).is_dir()
    config.model.path = str(Path(chosen.model).absolute()) if local else chosen.model
    config.trainer.output = str(target.with_name("runs") / target.stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not chosen.data:
        tasks.write_text(_sums(), encoding="utf-8")
    target.write_text(as_yaml(config, _heading(chosen)), encoding="utf-8")
    layout, took = plan.layout(config, machine.trainers(config)), time.perf_counter() - begin
    sys.stdout.write(
        f"wrote {chosen.output}: backend={config.backend}, {layout}, engines of {config.rollout.tensor} device(s); "
        f"a step takes at least {best.seconds:.0f} s (found in {took:.1f} s)\n"
    )
    if not chosen.data:
        sys.stdout.write(f"wrote {tasks.name}: {TASKS} sums; set data.train to your tasks\n")
    return 0


def _translation() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Writes the YAML file of a run from a program for another framework, by the tables of "
        "docs/from_other_systems.md, and lists what it could not translate."
    )
    add = parser.add_argument
    add("--from", dest="system", choices=("trl", "verl"), required=True, help="the framework")
    add("program", metavar="PROGRAM", type=Path, help="script.py of TRL, or command.sh of verl")
    add(
        "--gpus", type=int, default=0, metavar="N", help="processes that it ran in, for batch sizes"
    )
    add("--output", type=Path, default=Path("run.yaml"), metavar="FILE", help="to write (run.yaml)")
    return parser


def translate(chosen: argparse.Namespace) -> int:
    """Writes the YAML file of a program for another framework, and prints what is not in it.

    Raises ConfigError for a program that cannot be read, or a file that is there already.
    """
    from rftmega.run.foreign_source import read_trl, read_verl
    from rftmega.run.translation import as_yaml, translated

    if chosen.output.exists():
        raise ConfigError(
            f"{chosen.output} is there already. Move it away, or choose another --output."
        )
    try:
        text = chosen.program.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{chosen.program} can't be read: {error}.") from error
    system, read = {"trl": ("TRL", read_trl), "verl": ("verl", read_verl)}[chosen.system]
    try:
        found = translated(system, read(text), chosen.gpus)
    except ConfigError as error:
        raise ConfigError(f"{chosen.program}: {error}") from error
    heading = f"From {chosen.program.name}, a program for {system}, by `rftmega init`."
    chosen.output.write_text(as_yaml(found, heading), encoding="utf-8")
    sys.stdout.write(f"wrote {chosen.output}: {len(found.options)} options\n")
    if found.left:
        sys.stdout.write(f"not translated ({len(found.left)}):\n")
        sys.stdout.write("".join(f"  - {line}\n" for line in found.left))
    return 0


def _heading(chosen: argparse.Namespace) -> str:
    size = f"--gpus {chosen.gpus} --gpu-memory {chosen.gpu_memory:g}"
    name = shlex.quote(str(chosen.output))
    nodes = -(-chosen.gpus // chosen.gpus_per_node)
    start = (
        f"rftmega train {name} --processes {chosen.gpus}"
        if nodes == 1
        else f"rftmega launch slurm {name} --nodes {nodes} --gpus-per-node {chosen.gpus_per_node}"
    )
    return (
        f"GRPO with {chosen.model} on {chosen.gpus} devices of {chosen.gpu_memory:g} GB, made by `rftmega init`.\n"
        f"What it takes:  rftmega plan {name} {size}\n"
        f"Check it:       rftmega train {name} --processes {chosen.gpus} --dry-run\n"
        f"Start it:       {start}\n"
        "All options:    rftmega train --help"
    )


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in TEMPLATES):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in config.read_text(encoding="utf-8")


def _sums() -> str:
    """Returns the lines of a data file with addition problems of two numbers below 1000."""
    rng = random.Random(0)
    pairs = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(TASKS)]
    records = [{"prompt": ASKED.format(a, b), "label": str(a + b)} for a, b in pairs]
    return "".join(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    sys.exit(main())
