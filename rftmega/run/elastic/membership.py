"""Tells the nodes of an elastic run which of them are alive, and which of them train together.

Everything is in one folder that all nodes share, so there is no host whose failure ends the run:

    members/NAME.json      one node: what it is and does; its owner touches it several times per lease
    rounds/000003.json     the third round: which nodes train together, and in which layout
    rounds/000003.stop     asks the nodes of the round to save and stop, so that another can begin
    end.json               the run is over: its exit code and message

A round file is created by link(), so that only one of several nodes can create the round of a
number, and nodes that see different things still agree. Ages are differences between the file
server's own times: clocks of nodes don't matter.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

MEMBERS, ROUNDS, END = "members", "rounds", "end.json"
# states of a node in its round
READY = "ready"  # in no round, or its ranks have ended before they did anything
RUNNING = "running"
STOPPED = "stopped"  # its ranks saved a checkpoint and ended, as they were asked to
FAILED = "failed"  # a rank died; the others of the node were ended
ENDED = "ended"  # its ranks were ended, since another node failed
FINISHED = "finished"  # its ranks have finished the run


@dataclass(frozen=True)
class Member:
    """Member is what a node tells the others about itself.

    `address`: the host at which others reach its ranks; `store_port`: a free port there, for the
    ranks' rendezvous; `sign_port`: where its supervisor answers the others; `processes`: number of
    its ranks; `config`: digest of its config. `round`: the last round in which it took part, and
    its `state` there, with the `reason` of a failure. `leaving`: it was asked to end.
    `unreachable`: names of nodes that it can't connect to.
    """

    name: str
    token: str  # of this supervisor: a restarted one has another
    address: str
    store_port: int
    sign_port: int
    processes: int
    config: str
    round: int = 0
    state: str = READY
    reason: str = ""
    leaving: bool = False
    unreachable: tuple[str, ...] = ()
    joined: float = 0.0  # when, by the file server's clock

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Member":
        return cls(**{**said, "unreachable": tuple(said["unreachable"])})


@dataclass(frozen=True)
class Round:
    """Round is a period in which the same nodes train together.

    `members`: name and token of each node, in the order of their ranks; `changes`: options that
    differ from the config's; `address` and `port`: where the ranks meet; `reason`: why it began.
    `failures`: number of rounds in a row, this one's predecessor included, that failed without a
    new checkpoint; `checkpoint`: the latest one when the round began.
    """

    number: int
    members: tuple[tuple[str, str], ...]
    processes: int
    config: str
    changes: Mapping[str, Any]
    address: str
    port: int
    reason: str
    failures: int = 0
    checkpoint: str = ""

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Round":
        members = tuple((name, token) for name, token in said["members"])
        return cls(**{**said, "members": members})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)


@dataclass(frozen=True)
class ClusterView:
    """ClusterView is what a node read from the folder at one moment.

    `alive`: members whose lease has not expired, by name, in the order of their names; `silent`:
    the others, with the seconds since their last sign; `round`: the newest round, if there is one;
    `stop`: why its nodes are asked to stop, empty if they are not; `end`: exit code and message if
    the run is over.
    """

    alive: Mapping[str, Member] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)
    round: Round | None = None
    stop: str = ""
    end: tuple[int, str] | None = None


class Membership:
    """Membership is one node's access to the folder.

    All methods raise OSError if the folder can't be used at the moment. What `tell` could not write
    is written by the next `look`.
    """

    def __init__(self, folder: Path, member: Member, *, lease: float, began: Path | None = None):
        """Creates the folder if it does not exist. `lease`: seconds without a sign after which a
        node counts as failed. `began`: a file that was written when the nodes were started; an end
        of the run before that is one of an earlier start. None: when this node joins.
        """
        self.folder, self.member, self.lease = folder, member, lease
        for part in (MEMBERS, ROUNDS):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._file = folder / MEMBERS / f"{member.name}.json"
        self._began, self._since = began, 0.0
        self._untold = False

    def join(self) -> None:
        """Adds this node to the members."""
        self.tell()
        joined = self._file.stat().st_mtime
        self._since = joined if self._began is None else self._began.stat().st_mtime
        self.tell(joined=joined)

    def tell(self, **changes: Any) -> None:
        """Writes what has changed about this node; its lease begins anew."""
        self.member = replace(self.member, **changes)
        self._untold = True
        _write(self._file, asdict(self.member))
        self._untold = False

    def touch(self) -> None:
        """Renews this node's lease."""
        try:
            os.utime(self._file)
        except FileNotFoundError:  # someone deleted it
            self.tell()

    def leave(self) -> None:
        """Removes this node from the members, unless a later supervisor of its name has taken its
        place.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if Member.from_json(json.loads(self._file.read_text())).token == self.member.token:
                self._file.unlink()

    def replaced(self) -> bool:
        """Returns whether another supervisor of the same name writes the member's file."""
        found = _read(self._file)
        return found is not None and found.get("token") != self.member.token

    def look(self) -> ClusterView:
        """Returns what the folder says now."""
        if self._untold:
            self.tell()
        self.touch()
        now = self._file.stat().st_mtime
        alive: dict[str, Member] = {}
        silent: dict[str, float] = {}
        for path in sorted((self.folder / MEMBERS).glob("*.json")):
            try:
                # opening it makes a client of NFS ask for its times
                with path.open() as opened:
                    said, touched = opened.read(), os.fstat(opened.fileno()).st_mtime
                member = Member.from_json(json.loads(said))
            except (OSError, ValueError, KeyError, TypeError):  # replaced or removed meanwhile
                continue
            if now - touched > self.lease:
                silent[member.name] = now - touched
            else:
                alive[member.name] = member
        newest, stop = self.newest(), ""
        if newest is not None:
            stop = str((_read(self._stop_file(newest.number)) or {}).get("reason", ""))
        return ClusterView(alive, silent, newest, stop, self._end())

    def newest(self) -> Round | None:
        """Returns the newest round; None before the first."""
        numbers = sorted((self.folder / ROUNDS).glob("*.json"))
        found = _read(numbers[-1]) if numbers else None
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return None if found is None else Round.from_json(found)
        return None

    def begin(self, proposed: Round) -> bool:
        """Creates the round, unless there is one of its number. Returns whether it was created."""
        path = self.folder / ROUNDS / f"{proposed.number:06d}.json"
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        _write(draft, asdict(proposed))
        try:
            os.link(draft, path)
        except FileExistsError:
            # over NFS the reply to a successful link can get lost
            return draft.stat().st_nlink == 2
        except OSError:  # no hard links on this file system
            return _created(path, draft.read_text())
        finally:
            draft.unlink(missing_ok=True)
        return True

    def ask_to_stop(self, number: int, reason: str) -> None:
        """Asks all nodes of the round of this number to save and stop."""
        _write(self._stop_file(number), {"reason": reason})

    def finish(self, code: int, message: str) -> None:
        """Ends the run for all nodes, with this exit code and message, and removes the leases of
        nodes that have failed.
        """
        with contextlib.suppress(OSError):
            for name in self.look().silent:
                (self.folder / MEMBERS / f"{name}.json").unlink(missing_ok=True)
        _write(self.folder / END, {"code": code, "message": message})

    def _end(self) -> tuple[int, str] | None:
        """Returns exit code and message of the end of the run; None if it goes on."""
        # makes a client of NFS look for files that were not there before
        os.listdir(self.folder)
        end = _read(self.folder / END)
        with contextlib.suppress(KeyError, TypeError, ValueError, FileNotFoundError):
            if end is not None and (self.folder / END).stat().st_mtime >= self._since:
                return int(end["code"]), str(end["message"])
        return None

    def _stop_file(self, number: int) -> Path:
        return self.folder / ROUNDS / f"{number:06d}.stop"


def new_token() -> str:
    """Returns a token that no other supervisor has."""
    return uuid.uuid4().hex


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that readers see complete or not at all."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
    try:
        draft.write_text(json.dumps(content))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _created(path: Path, text: str) -> bool:
    try:
        with path.open("x") as opened:
            opened.write(text)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the content of a JSON file; None if it is not there or is not readable as such."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
