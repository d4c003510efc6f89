"""EngineNumerics holds the properties of the policy that decide how closely the log-probs of engine
and trainer can agree, and reduces the verdicts of all processes to a common one.
"""

from rftmega.run.placement.backend import Trainable
from rftmega.runtime.parallel.collectives import all_reduce


class EngineNumerics:
    """EngineNumerics implements `interfaces.Numerics` for the policy: its dtype, whether it has
    experts, and `agreed`.
    """

    def __init__(self, policy: Trainable, *, is_main: bool):
        self.dtype = str(policy.dtype).removeprefix("torch.")
        self.has_experts = policy.description.experts is not None
        self.is_main = is_main

    def agreed(self, exceeded: bool) -> bool:
        """Returns True on every process if any process passes True; a collective. `exceeded`:
        whether the log-prob mismatch exceeds its limit on this process.
        """
        return bool(all_reduce(int(exceeded), "max"))
