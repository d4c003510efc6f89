"""Import what every rank needs, once, in the server that `--processes` forks ranks from."""

import warnings

warnings.filterwarnings("ignore")  # Megatron names every accelerator that is not installed

# isort: split
import rftmega.callbacks.checkpointing
import rftmega.callbacks.evaluate
import rftmega.callbacks.metric_writers
import rftmega.data
import rftmega.observe.callbacks
import rftmega.rewards
import rftmega.strategy.reinforcement
import rftmega.strategy.supervised
import rftmega.trainer  # noqa: F401
