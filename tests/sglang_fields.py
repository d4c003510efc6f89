"""Writes tests/sglang_requests.json: the fields of SGLang's request classes, out of its wheel.

`python -m tests.sglang_fields sglang-0.5.23-*.whl`, of `pip download --no-deps sglang==0.5.23`.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

TABLE = Path(__file__).with_name("sglang_requests.json")
INTERNAL = "Internal fields"  # from here on a class has what no caller sets
CLASSES = {
    "sglang/srt/managers/io_struct.py": {
        "GenerateReqInput",
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
        "UpdateWeightFromDiskReqInput",
        "InitWeightsUpdateGroupReqInput",
        "DestroyWeightsUpdateGroupReqInput",
        "BeginWeightUpdateReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "EndWeightUpdateReqInput",
        "AbortReq",
    },
    "sglang/srt/sampling/sampling_params.py": {"SamplingParams"},
}


def fields_of(source: str, wanted: set[str]) -> dict[str, dict[str, bool]]:
    """Returns class -> field -> whether a caller must give it."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name not in wanted:
            continue
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        internal = (at for at in range(node.lineno, node.end_lineno or 0) if INTERNAL in lines[at])
        last = next(internal, len(lines))
        found[node.name] = {
            ast.unparse(each.target): each.value is None for each in fields if each.lineno <= last
        }
    return found


def main(wheel: str) -> None:
    table: dict[str, dict[str, bool]] = {}
    with zipfile.ZipFile(wheel) as held:
        for path, wanted in CLASSES.items():
            table |= fields_of(held.read(path).decode(), wanted)
    missing = set().union(*CLASSES.values()) - table.keys()
    assert not missing, f"{wheel} has no {sorted(missing)}"
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
