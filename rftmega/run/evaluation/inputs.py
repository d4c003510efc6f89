"""Computes checksums of the inputs of an evaluation. An evaluation resumes only if they are those
of the stored completions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.run.conversion.target_folder import fingerprint
from rftmega.run.evaluation.options import Candidate
from rftmega.run.input_files import described, sources_of


def inputs_of(
    config: RunConfig, candidates: Sequence[Candidate], adapter: str
) -> dict[str, dict[str, Any]]:
    """Returns option or model -> checksums: data, user code and templates by content, weights by
    names, sizes and times of their files.
    """
    found: dict[str, dict[str, Any]] = {
        name: dict(described(source)) for name, source in sources_of(config)
    }
    for each in candidates:
        found[f"model {each.label}"] = {"files": fingerprint(HFFolder(each.folder))}
    if adapter:
        found["--adapter"] = {"folder": adapter, "files": fingerprint(HFFolder(Path(adapter)))}
    return found
