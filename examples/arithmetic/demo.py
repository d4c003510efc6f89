"""The whole loop on a laptop: data, a warm start, GRPO on 4 processes; then a plot and a summary in
runs/demo.

Arguments are overrides of grpo.yaml, e.g. parallel.tensor=4 parallel.pipeline=1; --processes N
changes the number of processes.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rftmega.config import RunConfig, load
from rftmega.core.errors import ConfigError

PHASES = ("rollout", "score", "update", "push")


def run(*command: object) -> None:
    """Runs a Python command; exits with its exit code if it fails or is interrupted."""
    process = subprocess.Popen([sys.executable, *map(str, command)])
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the child receives it too, and ends its ranks first
            continue
    if code:
        sys.exit(code if code > 0 else 128 - code)


def summary(
    records: list[dict], config: RunConfig, processes: int, launched: float, finished: float
) -> dict:
    start, *steps = records
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    part = config.trainer.eval_accuracy
    accuracy = accuracy_of(start, part)
    return {
        "layout": f"TP{tensor} x PP{pipeline} x DP{processes // (tensor * pipeline)}",
        "steps": len(steps),
        "accuracy_before": start[accuracy],
        "accuracy_after": steps[-1][accuracy],
        **{
            name.removesuffix(f"_{part}"): value
            for name, value in steps[-1].items()
            if name.startswith("eval_") and name.endswith(f"_{part}") and name != accuracy
        },
        "logprob_gap_max": max(step["logprob_gap_max"] for step in steps),
        "seconds": round(finished - launched, 1),
        "startup_seconds": round(start["time"] - start["eval_seconds"] - launched, 1),
        "step_seconds": {
            phase: round(sum(s[f"seconds_{phase}"] for s in steps) / len(steps), 3)
            for phase in PHASES
        },
    }


def accuracy_of(record: dict[str, float], part: str) -> str:
    """Returns the name of the evaluation accuracy: of a single file, or of the one called held_out.

    `part` is the reward component that is 1 for a correct response.
    """
    return f"eval_{part}" if f"eval_{part}" in record else f"eval_held_out_{part}"


def draw(records: list[dict[str, float]], part: str, title: str, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = records[1:]
    axes.plot(
        [s["step"] for s in steps], [s["reward"] for s in steps], label="reward of the rollouts"
    )
    accuracy = accuracy_of(records[0], part)
    evaluated = [r for r in records if accuracy in r]
    axes.plot(
        [r["step"] for r in evaluated],
        [r[accuracy] for r in evaluated],
        "o-",
        label="held-out accuracy (greedy)",
    )
    axes.set(xlabel="step", ylim=(0, 1), title=title)
    axes.legend(loc="lower right")
    figure.savefig(target, dpi=120, bbox_inches="tight")


def main(
    example: Path = Path(__file__).parent,
    title: str = "GRPO on sums of two numbers",
    description: str | None = __doc__,
    own: Sequence[str] = (),
) -> None:
    """Runs make_data.py, warm_start.py and grpo.yaml of an example's folder, with the overrides
    `own`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="option=value")
    parser.add_argument("--processes", type=int, default=4)
    given = parser.parse_args()
    try:
        overrides = [*own, *given.overrides]
        config = load(example / "grpo.yaml", overrides)
    except ConfigError as error:  # before the warm start
        sys.exit(f"error: {error}")
    output = Path(config.trainer.output)
    run(example / "make_data.py")
    run(example / "warm_start.py")
    launched = time.time()
    chosen = [example / "grpo.yaml", *overrides, "--processes", given.processes]
    run("-m", "rftmega", "train", *chosen)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    result = summary(records, config, given.processes, launched, time.time())
    (output / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(records, config.trainer.eval_accuracy, title, output / "reward.png")
    print(json.dumps(result, indent=2))
    print(
        f"held-out accuracy: {result['accuracy_before']:.1%} before, {result['accuracy_after']:.1%} after"
    )
    print(
        f"wrote summary.json, reward.png, metrics.jsonl and the trained model (policy/) in {config.trainer.output}"
    )


if __name__ == "__main__":
    main()
