"""Writes train.jsonl of DAPO-Math-17k (arXiv:2503.14476) and aime24.jsonl of AIME 2024: chat
messages as prompts, numbers as labels. Each problem occurs once: the hub's files repeat them.

Without files it downloads BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024 from the
hub. A file has the columns prompt (chat messages) and reward_model ({"ground_truth": ...}), in a
format of docs/data.md (parquet, jsonl, ...).
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from rftmega.core.errors import DataError
from rftmega.data.records import records

FILES = {
    "train": ("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet"),
    "aime24": ("BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet"),
}


def problems(source: str | Path) -> Iterator[dict[str, Any]]:
    """Yields messages and label of each problem, once. Raises DataError for a problem with two
    labels.
    """
    seen: dict[str, str] = {}
    for place, record in records(source):
        if isinstance(record, DataError):
            raise record
        messages = [{"role": m["role"], "content": m["content"]} for m in record["prompt"]]
        label, key = str(record["reward_model"]["ground_truth"]), json.dumps(messages)
        label, key = str(record["reward_model"]["ground_truth"]), json.dumps(messages)
        if key not in seen:
            seen[key] = label
            yield {"prompt": messages, "label": label}
        elif seen[key] != label:
            raise DataError(f"{place}: the problem is there with another answer")


def write(target: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Writes one JSON object per line. Returns their number."""
    target.parent.mkdir(parents=True, exist_ok=True)
    text = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
    target.write_text("".join(text), encoding="utf-8")
    return len(text)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/dapo_math/data"))
    for name in FILES:
        parser.add_argument(f"--{name}", metavar="FILE", help="instead of the hub's")
    chosen = parser.parse_args(given)
    for name, (repository, file) in FILES.items():
        source = getattr(chosen, name) or hf_hub_download(repository, file, repo_type="dataset")
        number = write(chosen.folder / f"{name}.jsonl", problems(source))
        print(f"wrote {chosen.folder / name}.jsonl: {number} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
