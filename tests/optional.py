"""Packages that a run can do without, which lie where nobody finds them: see requirements/torchao.txt."""

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "optional"


def find() -> None:
    """Lets this process find them."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
