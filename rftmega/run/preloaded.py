"""Imports the modules that every rank needs, once, in the server that `--processes` forks ranks
from.
"""

import warnings

warnings.filterwarnings("ignore")  # Megatron warns about every accelerator that is not installed

# isort: split
import rftmega.data
import rftmega.monitoring.callbacks
import rftmega.monitoring.observers.checkpointing
import rftmega.monitoring.observers.evaluate
import rftmega.monitoring.observers.metric_writers
import rftmega.monitoring.observers.progress
import rftmega.rewards
import rftmega.run.placement.reinforcement
import rftmega.run.placement.supervised
import rftmega.trainer  # noqa: F401
