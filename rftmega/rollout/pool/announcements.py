"""Ordered messages from the first process (rank) of an engine to the engine's other processes,
which follow it.
"""

import json
import time
from typing import Any

from rftmega.core.errors import EngineFault
from rftmega.runtime.parallel.watchdog import mark

LOOK = 0.0005  # seconds between polls for the first process's next message


class Announcements:
    """Announcements is a channel for JSON values from the first process of an engine to the
    engine's other processes, in order.

    The messages go through a torch.distributed store, since a collective would block if the first
    process broke down.
    """

    def __init__(self, board: Any, name: str, *, speaks: bool):
        """Opens the channel `name`. `board`: a store of torch.distributed, in which nothing else
        uses keys that begin with `name`. `speaks`: whether this is the engine's first process,
        which sends the messages.
        """
        self.board, self.name, self.speaks = board, name, speaks
        self._attempt = self._turn = 0
        self._said = list[str]()  # keys in the store

    def begin(self) -> None:
        """Starts a new sequence of messages and ignores earlier ones. Every process of the engine
        calls it when a generation starts, and again after an engine fault.
        """
        self._attempt, self._turn = self._attempt + 1, 0

    def say(self, thing: Any) -> None:
        self._turn += 1
        self._set(str(self._turn), json.dumps(thing))

    def receive(self) -> Any:
        """Waits for the next message of the engine's first process and returns its JSON value.
        Raises EngineFault if that process broke down.
        """
        self._turn += 1
        while not self.board.check([self._key(str(self._turn))]):
            if self.board.check([self._key("broke")]):
                raise EngineFault("The first process of this engine broke down.")
            mark()  # the first process watches itself
            time.sleep(LOOK)
        return json.loads(self.board.get(self._key(str(self._turn))))

    def broke(self) -> None:
        """Announces to the engine's other processes that its first process broke down; does nothing
        if this is not the first process.
        """
        if self.speaks:
            self._set("broke", "")

    def end(self) -> None:
        """Deletes the messages from the store. Every process must have read all of them before."""
        for key in self._said:
            self.board.delete_key(key)
        self._said.clear()

    def _set(self, what: str, content: str) -> None:
        self.board.set(self._key(what), content)
        self._said.append(self._key(what))

    def _key(self, what: str) -> str:
        return f"{self.name}/{self._attempt}/{what}"
