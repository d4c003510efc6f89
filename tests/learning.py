"""The learning table: what the recipes of examples/ learn, three seeds each, against what is
asked of them.

`make learning` runs them, a core each, and writes runs/learning.json and an image of the curves
for each; names of recipes as arguments run only those, `--seeds 1` one seed. A run that has ended
is not repeated while its config, start and data are the same. tests/e2e/test_learning.py asserts
what is asked.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from benchmarks import machine
from rftmega.config import RunConfig, load
from rftmega.config.options.teachers import SELF
from rftmega.examples.smollm import demo as smollm

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
OUT = Path("runs/learning")  # from ROOT, where train_rl.py runs
RECORD = "learning.json"  # of a run, in its folder
DATA = {
    "arithmetic": "runs/demo/data",
    "shapes": "runs/shapes/data",
    "calculator": "runs/calculator/data",
    "guess": "runs/guess/data",
}
STARTS = {  # folder of a warm start -> its example, data, and arguments
    "runs/demo/model": ("arithmetic", "runs/demo/data/warm_start.jsonl", "--steps", "100"),
    "runs/demo/able": ("arithmetic", "runs/demo/data/warm_start.jsonl", "--steps", "160"),
    "runs/demo/scratch": ("arithmetic", "runs/demo/data/warm_start.jsonl", "--steps", "0"),
    "runs/demo/thinking": ("arithmetic", "runs/demo/data/thoughts.jsonl", "--steps", "160"),
    "runs/shapes/model": ("shapes", "runs/shapes/data"),
    "runs/calculator/model": ("calculator", "runs/calculator/data/warm_start.jsonl"),
    "runs/guess/model": ("guess", "runs/guess/data/warm_start.jsonl"),
}
SEEDS = (0, 1, 2)
MISSING = object()  # an option that the default part of its section does not have
Record = dict[str, Any]
# transformers makes its names as they are asked for, and not for two threads at once
importing = Lock()


@dataclass(frozen=True)
class Asked:
    """What a run must do to `metric`, a share of 1 in its metrics.jsonl; for `by_completions` to the
    greedy answers of its policy.
    """

    rise: float = 0.0
    end: float = 0.0
    metric: str = "eval_exact_match"
    by_completions: bool = False
    needs: str = ""  # another run of the same seed, which comes first
    # the option that names what that run has exported
    used: str = "reward.model_path={}/reward_model"
    example: str = "arithmetic"
    # and with the images of other questions, at the end
    at_most_swapped: float | None = None
    at_most: float = 1.0  # what it may reach: of a run that can't learn
    processes: int = 1
    layout: tuple[int, int] = (1, 1)  # tensor, pipeline
    gap: float = 1e-4  # the largest difference of a log-prob from the engine's

    def met(self, before: float, after: float, swapped: float = 0.0) -> bool:
        """Whether it did all."""
        by_chance = self.at_most_swapped is None or swapped <= self.at_most_swapped
        risen = after - before >= self.rise - 1e-9
        return risen and self.end <= after <= self.at_most and by_chance

    def __str__(self) -> str:
        if self.at_most < 1:
            return f"at most {100 * self.at_most:.0f} %"
        said = f"+{100 * self.rise:.0f} points" if self.rise else f"{100 * self.end:.0f} %"
        if self.at_most_swapped is not None:
            said += f", swapped at most {100 * self.at_most_swapped:.0f} %"
        return said


SHAPES = Asked(rise=0.2, example="shapes", metric="eval_held_out_exact_match", at_most_swapped=0.3)
DISTILLED = Asked(needs="grpo", used="algorithm.teachers=[{{path: {}/policy}}]")
FOUR = Asked(processes=4, layout=(2, 2))
CALCULATOR = replace(FOUR, rise=0.3, example="calculator")
GUESS = replace(FOUR, rise=0.2, example="guess", metric="eval_found")
SMOLLM = Asked(rise=0.2, example="smollm", metric="eval_called", gap=2.0)  # in bfloat16
FAMILY = (
    *("grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo", "cpgd", "ppo"),
    *("sapo", "gmpo", "dppo", "prime_ipo", "maxrl", "pass_at_k", "gdpo", "icepop"),
)
WITH_REFERENCE = ("dpo", "ipo", "kto")
RUNS = dict.fromkeys(FAMILY, Asked(rise=0.2)) | {
    "ttrl": Asked(rise=0.08),
    "sft": Asked(end=0.9, by_completions=True),
    "reward_model": Asked(end=0.9, metric="eval_accuracy"),
    # the share of held-out pairs whose right sum has gained more than the wrong one
    **dict.fromkeys(WITH_REFERENCE, Asked(end=0.75, metric="eval_accuracy")),
    "simpo": Asked(rise=0.02, metric="eval_accuracy"),  # without a reference it begins at 87 %
    "orpo": Asked(rise=0.05, metric="eval_accuracy"),
    "grpo_on_reward_model": Asked(rise=0.03, needs="reward_model"),
    # taught by the policy of grpo's 100 steps: alone in a third of them, and beside its rewards
    "distilled": replace(DISTILLED, rise=0.2),
    "distilled_and_rewarded": replace(DISTILLED, rise=0.2),
    "lora": Asked(rise=0.2),
    # from answers of earlier versions, with the correction and without
    **dict.fromkeys(("stale_1", "stale_2", "stale_4", "stale_8"), Asked(rise=0.2)),
    **dict.fromkeys(("stale_4_uncorrected", "stale_8_uncorrected"), Asked(rise=0.2)),
    # on images; chance is 20 %
    "shapes": SHAPES,
    "shapes_ppo": SHAPES,
    # with a tool, without it, and in turns; on 4 processes
    "calculator": CALCULATOR,
    "calculator_ppo": CALCULATOR,
    "calculator_without": replace(CALCULATOR, rise=-1.0, at_most=0.2),
    "guess": GUESS,
    "guess_ppo": GUESS,
    # SmolLM2 calls a tool: from itself with examples in its prompt, from rewards too, from them alone
    "smollm_distilled": SMOLLM,
    "smollm_distilled_and_rewarded": SMOLLM,
    "smollm_rewarded": replace(SMOLLM, rise=-1.0, at_most=0.2),
}


class Learning:
    """Runs recipes, each with one core of its own, and remembers which have ended."""

    def __init__(self, jobs: int):
        self.jobs = jobs
        self.locks: defaultdict[tuple[str, int], Lock] = defaultdict(Lock)

    def __call__(self, names: Iterable[str], seeds: Sequence[int] = SEEDS) -> list[Record]:
        """One record a run; all first seeds come before the second ones.

        Raises RuntimeError where one failed.
        """
        names = list(names)
        prepare({RUNS[name].example for name in names})
        wanted = [(name, seed) for seed in seeds for name in names]
        cores: SimpleQueue[int] = SimpleQueue()
        for core in sorted(os.sched_getaffinity(0))[: self.jobs]:
            cores.put(core)
        # A thread has a core, and so has what it starts: two runs that both use two threads wait
        # for each other's.
        with ThreadPoolExecutor(
            cores.qsize(), initializer=lambda: os.sched_setaffinity(0, {cores.get()})
        ) as pool:
            try:
                return list(pool.map(self.run, *zip(*wanted, strict=True)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def run(self, name: str, seed: int) -> Record:
        asked = RUNS[name]
        if asked.needs:
            self.run(asked.needs, seed)
        with self.locks[name, seed]:
            return done(name, seed) or learn(name, seed)


def overrides_of(name: str, seed: int) -> list[str]:
    """Of the recipe's file: its layout, a folder of its own."""
    tensor, pipeline = RUNS[name].layout
    given = [
        f"parallel.tensor={tensor}",
        f"parallel.pipeline={pipeline}",
        f"trainer.seed={seed}",
        f"trainer.output={OUT}/{name}-{seed}",
    ]
    if needed := RUNS[name].needs:
        given.append(RUNS[name].used.format(f"{OUT}/{needed}-{seed}"))
    return given


def recipe_of(name: str) -> Path:
    return EXAMPLES / RUNS[name].example / f"recipes/{name}.yaml"


def config_of(name: str, seed: int) -> RunConfig:
    return load(recipe_of(name), overrides_of(name, seed))


def settings_of(name: str, seed: int) -> Record:
    """What a run learns by: every option that is not at its default, and what is in the files that
    they name.
    """
    config = config_of(name, seed)
    named = [
        config.data.train,
        *config.data.held_out.values(),
        config.model.path,
        config.reward.model_path,
        config.critic.path,
        *[teacher.path for teacher in config.algorithm.teachers],
    ]
    plain, chosen = asdict(RunConfig()), asdict(config)
    changed = {section: options for section, options in chosen.items() if options != plain[section]}
    for section, options in changed.items():
        if isinstance(options, dict):
            changed[section] = {
                option: value
                for option, value in options.items()
                if value != plain[section].get(option, MISSING)
            }
    files = {name: digest(ROOT / name) for name in named if name not in ("", SELF)}
    return {"config": changed, "files": files}


def digest(path: Path) -> str:
    """Of a file, or of a model's weights."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def done(name: str, seed: int) -> Record | None:
    """The record of a run that has ended with the settings of today."""
    file = ROOT / OUT / f"{name}-{seed}" / RECORD
    record = json.loads(file.read_text()) if file.is_file() else None
    return record if record and record["settings"] == settings_of(name, seed) else None


def learn(name: str, seed: int) -> Record:
    """One run, from the command line to its record in its folder.

    Raises RuntimeError where it failed.
    """
    asked, folder = RUNS[name], ROOT / OUT / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "train_rl.py",
        str(recipe_of(name).relative_to(ROOT)),
        *overrides_of(name, seed),
        "--processes",
        str(asked.processes),
    ]
    say(f"{name}, seed {seed}: begins")
    begin, written = time.time(), machine.commit()
    with (folder / "log.txt").open("w") as log:
        ended = subprocess.run(
            [sys.executable, *command], cwd=ROOT, stdout=log, stderr=log, check=False
        )
    if ended.returncode:
        raise RuntimeError(
            f"{name}, seed {seed}, ended with {ended.returncode}; see {folder}/log.txt"
        )
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(m["step"], m[asked.metric]) for m in metrics if asked.metric in m]
    if asked.by_completions:
        config = config_of(name, seed)
        curve = [
            (0, accuracy(config.model.path, config.data.eval)),
            (len(metrics) - 1, accuracy(folder / "policy", config.data.eval)),
        ]
    swapped = metrics[-1].get("eval_swapped_exact_match")
    record = {
        "name": name,
        "seed": seed,
        "before": curve[0][1],
        "after": curve[-1][1],
        "asked": str(asked),
        "met": asked.met(curve[0][1], curve[-1][1], swapped or 0.0),
        "swapped": swapped,
        "curve": curve,
        "learnt_from": [(m["step"], m["reward"]) for m in metrics if "reward" in m],
        "logprob_gap_max": max(
            (m["logprob_gap_max"] for m in metrics if "logprob_gap_max" in m), default=None
        ),
        "seconds": round(time.time() - begin),
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "commit": written,
        "command": "python " + " ".join(command),
        "settings": settings_of(name, seed),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1))
    say(
        f"{name}, seed {seed}: {record['before']:.1%} -> {record['after']:.1%} in {record['seconds']} s"
    )
    return json.loads(json.dumps(record))  # as `done` gives it


def accuracy(model: str | Path, file: str) -> float:
    """Share of greedy answers that are the label, by transformers; prompts of one length at a time."""
    import torch

    with importing:
        from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    policy, tokenizer = (
        AutoModelForCausalLM.from_pretrained(ROOT / model),
        AutoTokenizer.from_pretrained(ROOT / model),
    )
    by_length = defaultdict(list)
    records = [json.loads(line) for line in (ROOT / file).read_text().splitlines()]
    for record in records:
        by_length[len(record["prompt"])].append(record)
    right = 0
    for length, group in by_length.items():
        tokens = torch.tensor([tokenizer.encode(record["prompt"]) for record in group])
        completions = policy.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=4
        )[:, length:]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        right += sum(text == record["label"] for text, record in zip(texts, group, strict=True))
    return right / len(records)


def prepare(examples: Collection[str]) -> None:
    """Data and warm starts of these examples, once; they are the same whenever they are made."""
    if "smollm" in examples:
        smollm.prepare(ROOT / smollm.FOLDER)
    made = [
        [EXAMPLES / example / "make_data.py", DATA[example]]
        for example in sorted(examples)
        if example in DATA
    ]
    made += [
        [EXAMPLES / example / "warm_start.py", data, folder, *arguments]
        for folder, (example, data, *arguments) in STARTS.items()
        if example in examples and not (ROOT / folder / "model.safetensors").is_file()
    ]
    for command in made:
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def draw(name: str, records: Sequence[Record], target: Path) -> None:
    """The metric of every seed over the steps, and the rewards that were learnt from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for record in records:
        colour = f"C{record['seed']}"
        axes.plot(
            *zip(*record["curve"], strict=True),
            "o-",
            color=colour,
            label=f"held out, seed {record['seed']}",
        )
        if record["learnt_from"]:
            axes.plot(*zip(*record["learnt_from"], strict=True), color=colour, alpha=0.3)
    axes.set(
        xlabel="step",
        title=f"{name} (thin: mean reward of the rollouts)" if records[0]["learnt_from"] else name,
    )
    axes.legend(loc="lower right")
    figure.savefig(target, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def report(records: Sequence[Record]) -> str:
    """Writes runs/learning.json and an image a recipe; the table, a line a recipe."""
    rows = {}
    lines = [
        "| recipe | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | asked | met |",
        "|---" * (len(SEEDS) + 3) + "|",
    ]
    for name in RUNS:
        found = {record["seed"]: record for record in records if record["name"] == name}
        if not found:
            continue
        rows[name] = row_of(list(found.values()))
        draw(name, list(found.values()), ROOT / OUT / f"{name}.png")
        cells = [
            f"{100 * r['before']:.1f} to {100 * r['after']:.1f}{swapped_of(r)}"
            if (r := found.get(s))
            else ""
            for s in SEEDS
        ]
        met = sum(record["met"] for record in found.values())
        lines.append(f"| `{name}` | {' | '.join(cells)} | {RUNS[name]} | {met} of {len(found)} |")
    content = {"machine": machine.here(), "rows": rows, "runs": records}
    (ROOT / "runs/learning.json").write_text(json.dumps(content, indent=1))
    return "\n".join(lines) + "\n"


def row_of(records: Sequence[Record]) -> dict[str, str]:
    """Returns the figures of a recipe in docs/results.md, in percent, a value a seed."""
    newest = max(records, key=lambda record: record["date"])
    row = {name: newest[name] for name in ("date", "commit")}
    row["before"] = f"{100 * records[0]['before']:.1f}"
    row["after"] = ", ".join(f"{100 * record['after']:.1f}" for record in records)
    row["swapped"] = ", ".join(f"{100 * (record.get('swapped') or 0):.1f}" for record in records)
    return row


def swapped_of(record: Record) -> str:
    """What the table says of a run with the images of other questions."""
    found = record.get("swapped")
    return "" if found is None else f" (swapped {100 * found:.1f})"


def ended() -> list[Record]:
    """Of all runs, those that have ended with the settings of today."""
    return [record for name in RUNS for seed in SEEDS if (record := done(name, seed))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="recipe", help=", ".join(RUNS))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at the same time"
    )
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in RUNS]:
        sys.exit(f"error: there is no run {unknown[0]!r}; these are: {', '.join(RUNS)}")
    try:
        Learning(given.jobs)(given.names or RUNS, SEEDS[: given.seeds])
    finally:
        sys.stdout.write(report(ended()))


if __name__ == "__main__":
    main()
