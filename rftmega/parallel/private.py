"""Files of a run may hold prompts, paths and an environment: they are nobody else's business."""

import os


def keep_private() -> None:
    """What this process and those that it starts make from now on is not for others, and for the group only where the umask
    said so before.
    """
    os.umask(os.umask(0o077) | 0o007)
