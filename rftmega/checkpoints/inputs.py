"""Compares the input files and models of a run with the inputs of the run that saved the
checkpoint.
"""

from collections.abc import Mapping
from typing import Any

Inputs = Mapping[str, Mapping[str, Any]]
"""By option (and file): "rows" of data, "sha256" of a file, "weights" of a model, where known."""

SHOWN = 12  # characters of a checksum


def changed_inputs(before: Inputs, now: Inputs) -> list[str]:
    """Returns a line of text for each input (data file or model) that is known in both runs and has
    changed. `before`: the inputs of the run that saved the checkpoint; `now`: the inputs of this
    run.
    """
    return [
        f"{name}: {_told(before[name])} -> {_told(now[name])}"
        for name in now
        if name in before and before[name] != now[name]
    ]


def _told(known: Mapping[str, Any]) -> str:
    said = [f"{known['rows']} rows"] if "rows" in known else []
    said += [
        f"{kind} {str(known[kind])[:SHOWN]}" for kind in ("sha256", "weights") if kind in known
    ]
    return ", ".join(said)
