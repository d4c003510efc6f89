"""Brings the policy's weights to servers: through memory of one host, a process group, or files."""

from rftmega.transport.disk_weights import DiskWeights
from rftmega.transport.network_weights import NetworkWeights
from rftmega.transport.shared_weights import SharedWeights

__all__ = ["DiskWeights", "NetworkWeights", "SharedWeights"]
