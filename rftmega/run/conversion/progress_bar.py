"""Shows the progress of a conversion."""

import sys
from pathlib import Path

from tqdm import tqdm


def progress_bar(
    folder: Path, text: str, copies: int = 1, *, total: int | None = None
) -> "tqdm[None]":
    """Returns a progress bar labelled `text` over `total` bytes. With total None, the bar covers
    the weights in `folder`, each counted `copies` times, as often as the conversion reads or writes
    it.
    """
    if total is None:
        files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".distcp")]
        total = copies * sum(path.stat().st_size for path in files)
    return tqdm(total=total, unit="B", unit_scale=True, desc=text, file=sys.stderr)
