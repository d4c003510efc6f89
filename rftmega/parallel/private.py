"""Files of a run may hold prompts, paths and an environment: they are nobody else's business."""

import os


def keep_private() -> None:
    """Hides what this process and its children write from now on from other users, and from the
    group unless the umask let it read before.
    """
    os.umask(os.umask(0o077) | 0o007)
