"""Tests may import megatron.core anywhere, so its view of torch is installed before any of them."""

from rftmega import device

device.prepare_megatron()
