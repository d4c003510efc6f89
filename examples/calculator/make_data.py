"""Writes train.jsonl, eval.jsonl and warm_start.jsonl: products of two two-digit numbers, no prompt
in more than one file.
"""

import argparse
import json
import random
from pathlib import Path

SIZES = {"eval": 200, "warm_start": 1000, "train": 3000}


def write(folder: Path, *, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    for name, size in SIZES.items():
        chosen, pairs = pairs[:size], pairs[size:]
        records = [{"prompt": f"{a}*{b}", "label": str(a * b)} for a, b in chosen]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/calculator/data"))
    write(parser.parse_args().folder)
