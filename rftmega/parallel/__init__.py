"""Who am I among the processes, and how do they talk? The only reader of Megatron's parallel state."""

from rftmega.parallel.launch import World, start
from rftmega.parallel.topology import Topology

__all__ = ["Topology", "World", "start"]
