"""Reinforcement fine-tuning of a language model: reads a config, then trains, here or in the
processes that it starts.
"""

import sys

from rftmega.runtime.parallel import preemption

if __name__ == "__main__":
    preemption.listen()  # before anything that takes time

from rftmega.run import api, command_line  # noqa: E402


def main() -> int:
    return command_line.run(__doc__)


if __name__ == "__main__":
    api.prepare()
    sys.exit(main())
