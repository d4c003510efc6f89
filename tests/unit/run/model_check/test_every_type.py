"""`rftmega check` of a tiny model of each type of transformers that backend=fsdp trains: random weights
are no problem of a folder.
"""

import json
from pathlib import Path

import pytest

from rftmega.examples.arithmetic import warm_start
from rftmega.run.model_check.check import ModelCheck
from tests.families import TABLE, save_tiny_of

FEW = ("rwkv", "doge")
KINDS = [
    kind if kind in FEW else pytest.param(kind, marks=pytest.mark.ranks)
    for kind in (
        row["type"] for row in json.loads(TABLE.read_text())["rows"] if row["verdict"] == "ok"
    )
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_model_has_no_problem(kind: str, tmp_path: Path) -> None:
    save_tiny_of(kind, tmp_path)
    warm_start.tokenizer().save_pretrained(tmp_path)
    found = ModelCheck(tmp_path, ("fsdp",), ("fsdp",)).run()
    problems = [each for each in found if each.state == "problem" and each.check != "stop tokens"]
    assert not problems
    assert {each.check for each in found} >= {"log-probs, fsdp", "packing, fsdp", "export, fsdp"}
