"""Writes train.jsonl and eval.jsonl of MBPP (arXiv:2108.07732): the task as prompt, and its asserts
as the label that `reward.code` runs.

Without files it downloads google-research-datasets/mbpp from the hub. A file has the columns text,
test_list (asserts), test_setup_code, and challenge_test_list, in a format of docs/data.md (parquet,
jsonl, ...).
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

HUB = "google-research-datasets/mbpp"
FILES = {"train": "full/train-00000-of-00001.parquet", "eval": "full/test-00000-of-00001.parquet"}
ASKS = """{text}

Your function is called as here:

{example}

Try it out with the tool before you answer. Then give the whole function in one ```python block."""


def tasks(source: str | Path) -> Iterator[dict[str, str]]:
    """Yields prompt and label of each record: the prompt shows one assert, the label has all.

    Raises DataError for a record without an assert.
    """
    for place, record in records(source):
        if isinstance(record, DataError):
            raise record
        asserts = [*record["test_list"], *(record.get("challenge_test_list") or ())]
        if not asserts:
            raise DataError(f"{place}: the task has no assert")
        prompt = ASKS.format(text=str(record["text"]).strip(), example=asserts[0])
        yield {"prompt": prompt, "label": json.dumps({"tests": _program(record, asserts)})}


def _program(record: dict[str, Any], asserts: list[str]) -> str:
    """Returns the asserts as one program, after their set-up code."""
    setup = str(record.get("test_setup_code") or "").strip()
    return "\n".join([setup, *asserts] if setup else asserts)


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
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/code_agent/data"))
    for name in FILES:
        parser.add_argument(f"--{name}", metavar="FILE", help="instead of the hub's")
    chosen = parser.parse_args(given)
    for name, file in FILES.items():
        source = getattr(chosen, name) or hf_hub_download(HUB, file, repo_type="dataset")
        number = write(chosen.folder / f"{name}.jsonl", tasks(source))
        print(f"wrote {chosen.folder / name}.jsonl: {number} tasks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
