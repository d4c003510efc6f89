"""Logs warnings at the start of a run: dropout of config.json that is not applied, bfloat16 on a CPU
that is slow at it, and old completions without importance sampling.
"""

import logging
from pathlib import Path

from rftmega.config import RunConfig
from rftmega.config.options.algorithms import NoImportance
from rftmega.converters.dropout_fields import dropped_by
from rftmega.core.json_files import read_json_object
from rftmega.runtime import device
from rftmega.runtime.device.cpu_speed import bfloat16_ratio

SLOW = 1.5  # ratio of times, bfloat16 over float32

log = logging.getLogger(__name__)


def tell(config: RunConfig) -> None:
    """Logs the warnings of this module that apply; called on one process only."""
    for note in (_dropout(config), _bfloat16(config), _staleness(config)):
        if note:
            log.warning("%s", note)


def _dropout(config: RunConfig) -> str:
    """Returns a warning that the dropout of config.json is not applied; "" if it sets none."""
    path = Path(config.model.path) / "config.json"
    found = dropped_by(read_json_object(path)) if path.is_file() else {}
    if not found:
        return ""
    said = ", ".join(f"{name}={share:g}" for name, share in found.items())
    return (
        f"{path} says {said}. That is of the run that made the model, and nothing is dropped by it here: scoring and generation "
        f"never drop, and an update drops what model.dropout={config.model.dropout:g} says."
    )


def _bfloat16(config: RunConfig) -> str:
    """Returns a note on bfloat16's speed here; "" if the model is not computed in it on a CPU."""
    if config.model.dtype != "bfloat16" or device.current().type != "cpu":
        return ""
    ratio = bfloat16_ratio()
    said = f"Products of matrices in bfloat16 take {ratio:.1f} times as long as in float32 on this processor"
    if ratio < SLOW:
        return f"{said}."
    return f"{said}, which has no instructions for them. Set model.dtype=float32, unless the memory for it is missing."


def _staleness(config: RunConfig) -> str:
    """Returns a note on completions of earlier policies; "" if there are none, or if importance
    sampling corrects for them.
    """
    stale = config.trainer.max_staleness
    if not stale or not isinstance(config.algorithm.importance_sampling, NoImportance):
        return ""
    return (
        f"trainer.max_staleness={stale} without importance sampling: completions of policies up to {stale} versions old count "
        "as if the present policy had sampled them. Set algorithm.importance_sampling.type=token (or sequence, mask) to correct "
        "for it (docs/asynchronous.md)."
    )
