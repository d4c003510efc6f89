"""Checks that a gradient reaches the adapters of a value model, whose head has one of its own."""

from collections.abc import Iterable

from torch import Tensor

from rftmega.core.errors import NothingTrained
from rftmega.runtime.parallel.collectives import all_reduce


class ActiveAdapters:
    """ActiveAdapters records whether a gradient has ever reached a value model's adapters."""

    def __init__(self) -> None:
        self.seen = False

    def refuse_lost(self, adapters: Iterable[Tensor], head: Iterable[Tensor]) -> None:
        """Raises NothingTrained, on every process, if a value `head` with nonzero weights has a
        gradient and none reaches the `adapters`.

        The norm of all gradients would hide it. A collective. The gradients are this process's.
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
    """Returns 0 if the gradients of all processes are 0, otherwise 1."""
    found = all_reduce(int(any(bool(each.any()) for each in gradients)), "max")
    return float(found)
