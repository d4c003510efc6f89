"""Tests may import megatron.core anywhere, so its view of torch is installed before any of them."""

import rftmega.device.before_megatron  # noqa: F401

# isort: split
