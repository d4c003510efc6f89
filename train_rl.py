"""Reinforcement fine-tuning of a language model: reads a config, then trains, here or in the
processes that it starts.
"""

import sys

from rftmega.parallel import preemption

if __name__ in ("__main__", "__mp_main__"):  # a rank of --processes on CUDA is the second
    preemption.listen()  # before anything that takes time

from rftmega.launch import command_line  # noqa: E402
from rftmega.launch.train import train  # noqa: E402


def main() -> int:
    return command_line.run(train, __doc__)


if __name__ == "__main__":
    command_line.prepare()
    sys.exit(main())
