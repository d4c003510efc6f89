"""Supervised responses trained on in addition to the rewarded completions (PTX; arXiv:2203.02155,
section 3.5).
"""

from collections.abc import Iterator
from typing import Any, Protocol

from rftmega.core.interfaces import Resumable
from rftmega.core.types import Auxiliary, LossFn, Rows
from rftmega.trainer.experience import given


class Order(Resumable, Protocol):
    """Order is an endless stream of batches of supervised rows."""

    def __iter__(self) -> Iterator[Rows]: ...


class PTX:
    """Calling PTX returns the next batch of `order` as an Auxiliary loss with weight `coef`."""

    def __init__(self, order: Order, loss_fn: LossFn, coef: float):
        self.order, self.loss_fn, self.coef = order, loss_fn, coef

    def __call__(self) -> Auxiliary:
        return Auxiliary("ptx", given(next(iter(self.order))), self.loss_fn, self.coef)

    def state(self) -> Any:
        """Returns the position in the data order, for a resume."""
        return self.order.state()

    def load_state(self, state: Any) -> None:
        self.order.load_state(state)
