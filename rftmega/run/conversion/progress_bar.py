"""Shows how far a conversion is."""

import sys
from pathlib import Path

from tqdm import tqdm


def progress_bar(folder: Path, text: str, copies: int = 1) -> "tqdm[None]":
    """Shows the bytes of a folder's weights that are done."""
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".distcp")]
    total = copies * sum(path.stat().st_size for path in files)
    return tqdm(total=total, unit="B", unit_scale=True, desc=text, file=sys.stderr)
