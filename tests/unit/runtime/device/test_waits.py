"""What a micro-batch needs is sent to the device without a wait for it."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rftmega.backends.fsdp.decoder_inputs import feed
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience
from tests.layouts import rows_of

ELSEWHERE = torch.device("meta")


class Waits(TorchDispatchMode):
    """Counts copies to another device: those that the host waits for, and all."""

    waited = sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and given.get("device") == ELSEWHERE:
            self.sent += 1
            self.waited += not given.get("non_blocking", False)
        return func(*args, **given)


def experience() -> Experience:
    rows = rows_of([[5, 9, 130, 2, 77], [3, 0]], [2, 1])
    values = torch.ones(rows.mask.shape)
    return Experience(
        rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, values, values, None, values
    )


def test_the_columns_of_a_micro_batch_are_sent_without_a_wait() -> None:
    for given in (experience(), experience().ragged()):
        with Waits() as seen:
            there = given.to(ELSEWHERE)
        column = there.advantage
        flat = column.flat if isinstance(column, Ragged) else column
        assert flat.device == ELSEWHERE
        assert seen.sent >= 6 and not seen.waited


def test_columns_that_come_to_the_host_are_waited_for() -> None:
    class Column:
        def to(self, device: torch.device, *, non_blocking: bool) -> "Column":
            assert device.type == "cpu" and not non_blocking
            return self

    given = experience().changed(lambda value: Column())
    assert isinstance(given.to(torch.device("cpu")).advantage, Column)


def test_what_a_model_of_transformers_is_fed_is_sent_without_a_wait() -> None:
    rows = experience().rows
    for packed in (True, False):
        with Waits() as seen:
            feed(rows.tokens, rows.lengths, packed=packed, where=ELSEWHERE)
        assert seen.sent == 5 and not seen.waited
