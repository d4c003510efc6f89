"""Announcements: what the first process of an engine tells the engine's other processes."""

import json
import time
from typing import Any

from rftmega.core.errors import EngineFault
from rftmega.runtime.parallel.watchdog import mark

LOOK = 0.0005  # seconds between two looks of a process at what the first has said


class Announcements:
    """Announcements passes what JSON has from the first process of an engine to the others, in order.

    They go through a store: a collective would wait for a first process that broke down.
    """

    def __init__(self, board: Any, name: str, *, speaks: bool):
        """`board`: a store of torch.distributed, where these announcements alone have the `name`.

        One process of the engine `speaks`.
        """
        self.board, self.name, self.speaks = board, name, speaks
        self._attempt = self._turn = 0
        self._said = list[str]()  # keys at the board

    def begin(self) -> None:
        """Begins anew, after a fault too: what was said before is not heard any more."""
        self._attempt, self._turn = self._attempt + 1, 0

    def say(self, thing: Any) -> None:
        self._turn += 1
        self._set(str(self._turn), json.dumps(thing))

    def hear(self) -> Any:
        """Waits for what the first process says next. Raises EngineFault where it broke down."""
        self._turn += 1
        while not self.board.check([self._key(str(self._turn))]):
            if self.board.check([self._key("broke")]):
                raise EngineFault("The first process of this engine broke down.")
            mark()  # the first process watches itself
            time.sleep(LOOK)
        return json.loads(self.board.get(self._key(str(self._turn))))

    def broke(self) -> None:
        """Tells, of the first process, that it broke down."""
        if self.speaks:
            self._set("broke", "")

    def end(self) -> None:
        """Clears the board; every process has heard all."""
        for key in self._said:
            self.board.delete_key(key)
        self._said.clear()

    def _set(self, what: str, content: str) -> None:
        self.board.set(self._key(what), content)
        self._said.append(self._key(what))

    def _key(self, what: str) -> str:
        return f"{self.name}/{self._attempt}/{what}"
