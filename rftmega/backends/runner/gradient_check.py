"""Checks that a value model's adapters get a gradient if its value head gets one."""

from collections.abc import Iterable

from torch import Tensor

from rftmega.core.errors import NothingTrained
from rftmega.runtime.parallel.collectives import all_reduce


class ActiveAdapters:
    """ActiveAdapters records whether a value model's adapters have ever had a nonzero gradient."""

    def __init__(self) -> None:
        self.seen = False

    def refuse_lost(self, adapters: Iterable[Tensor], head: Iterable[Tensor]) -> None:
        """Raises NothingTrained, on every process, if the value head has a nonzero gradient and the
        adapters have none; a collective.

        `adapters`, `head`: this process's gradients of the two. A norm over all gradients would not
        reveal the error.
        """
        reached, pulls = _anywhere(adapters), _anywhere(head)
        self.seen = bool(reached)
        if pulls and not self.seen:
            raise NothingTrained(
                "The gradient of a value model's adapters is exactly 0, though its head has one: the run would learn nothing but "
                "the head. Something between them is cut off, as recomputation behind a frozen layer does; this is a bug of "
                "rftmega's, or of a plugin's. parallel.recompute=none may avoid it."
            )


def _anywhere(gradients: Iterable[Tensor]) -> float:
    """Returns 0 if the gradients are 0 on all processes, otherwise 1; a collective."""
    found = all_reduce(int(any(bool(each.any()) for each in gradients)), "max")
    return float(found)
