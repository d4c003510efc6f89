"""Tests may import megatron.core anywhere, so its view of torch is installed before any of them."""

import rftmega.runtime.device.before_megatron  # noqa: F401

# isort: split
