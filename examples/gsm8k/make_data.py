"""Writes train.jsonl and eval.jsonl of GSM8K (arXiv:2110.14168): the question as prompt, and the
number after #### in the solution as label.

Without files it downloads openai/gsm8k from the hub. A file has the columns question and answer, in
a format of docs/data.md (parquet, jsonl, ...).
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import hf_hub_download

from rftmega.core.errors import DataError
from rftmega.data.records import records

HUB = "openai/gsm8k"
FILES = {"train": "main/train-00000-of-00001.parquet", "eval": "main/test-00000-of-00001.parquet"}


def problems(source: str | Path) -> Iterator[dict[str, str]]:
    """Yields prompt and label of each record. Raises DataError for a record without an answer."""
    for place, record in records(source):
        if isinstance(record, DataError):
            raise record
        solution, mark, number = str(record["answer"]).rpartition("####")
        if not mark or not solution:
            raise DataError(f"{place}: the answer has no ####")
        yield {"prompt": str(record["question"]), "label": number.strip().replace(",", "")}


def write(target: Path, lines: Iterable[dict[str, str]]) -> int:
    """Writes one JSON object per line. Returns their number."""
    target.parent.mkdir(parents=True, exist_ok=True)
    text = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
    target.write_text("".join(text), encoding="utf-8")
    return len(text)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/gsm8k/data"))
    for name in FILES:
        parser.add_argument(f"--{name}", metavar="FILE", help="instead of the hub's")
    chosen = parser.parse_args(given)
    for name, file in FILES.items():
        source = getattr(chosen, name) or hf_hub_download(HUB, file, repo_type="dataset")
        number = write(chosen.folder / f"{name}.jsonl", problems(source))
        print(f"wrote {chosen.folder / name}.jsonl: {number} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
