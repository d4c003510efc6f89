"""Writes train.jsonl, eval.jsonl and warm_start.jsonl: sums of two numbers below 50, no prompt in
more than one file.

The mirror image of an evaluation prompt may be trained on: 3+4= may be in train.jsonl while 4+3= is
in eval.jsonl. Also written: train_pairs.jsonl and eval_pairs.jsonl, preferences for the right sum
(of prompts that are not, and that are, in eval.jsonl); small_train.jsonl and small_eval.jsonl, sums
of two numbers below 30; thoughts.jsonl, the prompts of warm_start.jsonl with an equal sum before
the answer (17+25= is 12+30=42, or 22+20=42), several for each.
"""

import argparse
import json
import random
from pathlib import Path

BELOW, SMALL = 50, 30
SIZES = {"eval": 200, "warm_start": 1000, "train": 1300}
SMALL_SIZES = {"small_eval": 100, "small_train": 800}
WRONG_ANSWERS = 3  # per prompt of train_pairs.jsonl
THOUGHTS = 8  # per prompt of thoughts.jsonl
Sum = tuple[int, int]


def write(folder: Path, *, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = split(BELOW, SIZES, seed) | split(SMALL, SMALL_SIZES, seed)
    for name, sums in files.items():
        write_lines(
            folder / f"{name}.jsonl",
            [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in sums],
        )
    drawn = random.Random(seed)
    given = {"train": (files["warm_start"] + files["train"]) * WRONG_ANSWERS, "eval": files["eval"]}
    for name, sums in given.items():
        write_lines(folder / f"{name}_pairs.jsonl", [preference(a, b, drawn) for a, b in sums])
    drawn = random.Random(seed)
    thoughts = [
        (a, b, thought(a, b, drawn)) for a, b in files["warm_start"] for _ in range(THOUGHTS)
    ]
    write_lines(
        folder / "thoughts.jsonl",
        [{"prompt": f"{a}+{b}=", "label": f"{equal}={a + b}"} for a, b, equal in thoughts],
    )


def split(below: int, sizes: dict[str, int], seed: int) -> dict[str, list[Sum]]:
    """Splits all sums of two numbers below `below` randomly into lists of the given
    sizes, by name.
    """
    pairs = [(a, b) for a in range(below) for b in range(below)]
    random.Random(seed).shuffle(pairs)
    found = {}
    for name, size in sizes.items():
        found[name], pairs = pairs[:size], pairs[size:]
    return found


def preference(a: int, b: int, drawn: random.Random) -> dict[str, str]:
    """Returns the right sum with a plausible wrong one: close to it, a digit off, or of other
    numbers.
    """
    near = [a + b + off for off in (-10, -2, -1, 1, 2, 10) if a + b + off >= 0]
    wrong = (
        drawn.choice(near)
        if drawn.random() < 0.75
        else drawn.choice([n for n in range(2 * BELOW - 1) if n != a + b])
    )
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}


def thought(a: int, b: int, drawn: random.Random) -> str:
    """Returns an equal sum: tens or units of one number are moved to the other, or tens and units
    are grouped; in either order.
    """
    tens_a, units_a, tens_b, units_b = a - a % 10, a % 10, b - b % 10, b % 10
    moved = [
        (tens_a + b, units_a),
        (units_a + b, tens_a),
        (tens_b + a, units_b),
        (units_b + a, tens_b),
    ]
    x, y = drawn.choice([*moved, (units_a + units_b, tens_a + tens_b)])
    return drawn.choice([f"{x}+{y}", f"{y}+{x}"])


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/demo/data"))
    write(parser.parse_args().folder)
