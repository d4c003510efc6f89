"""Imports what every rank needs, once, in the server that `--processes` forks ranks from."""

import warnings

warnings.filterwarnings("ignore")  # Megatron names every accelerator that is not installed

# isort: split
import rftmega.callbacks.metric_writers  # noqa: F401
