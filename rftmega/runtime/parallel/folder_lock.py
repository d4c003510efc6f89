"""Locks a folder against other programs, on this host and on others that share the folder.

The lock is a file in the folder. It names the process that holds the lock, which touches the file
every BEAT_SECONDS. A process that died leaves its lock file behind; the next process takes it over.
Everything works over NFS: the file is created by link(), and ages are differences between the file
server's times.
"""

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rftmega.core.errors import LockedError

FILE = ".rftmega.lock"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
LOOK_SECONDS = 0.5  # between two checks of a lock that may be alive
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder identifies the process that holds a folder's lock; it is the content of the lock file."""

    what: str  # kind of program, such as "run"
    host: str
    # its boot and process-id namespace: within one, a process can be looked up
    machine: str
    pid: int
    started: int  # of the process, in clock ticks since the boot
    since: str
    token: str
    stale: float = STALE_SECONDS  # seconds without a touch after which others may take it over

    @classmethod
    def present(cls, what: str, stale: float = STALE_SECONDS) -> "Holder":
        """Returns a Holder that describes this process; `what`: the kind of program, such as "run"."""
        started = process_start(os.getpid())
        assert started is not None
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        return cls(
            what,
            socket.gethostname(),
            _machine(),
            os.getpid(),
            started,
            since,
            uuid.uuid4().hex,
            stale,
        )

    @property
    def here(self) -> bool:
        return self.machine == _machine()

    @property
    def dead(self) -> bool:
        """Returns whether the holder's process is known to have ended: it ran on this machine, and
        its process id is free or belongs to a later process.
        """
        return self.here and process_start(self.pid) != self.started

    def __str__(self) -> str:
        return f"another {self.what}, process {self.pid} on {self.host}, since {self.since}"


class FolderLock:
    """FolderLock prevents other programs from locking `folder` between `acquire` and `release`."""

    def __init__(
        self,
        folder: str | Path,
        what: str,
        *,
        beat: float | None = None,
        stale: float | None = None,
        patient: bool = False,
        lost: Callable[[str], None] | None = None,
    ):
        """Prepares a lock; `what` is the kind of program that locks, such as "run".

        `patient`: watch the lock of a process on this host like that of one on another host, since
        the process may be stopped (SIGSTOP) rather than alive; by default it is refused at once.

        `beat`: seconds between two touches of the lock file; `stale`: seconds without a touch after
        which a lock may be taken over. If another program has taken over this lock, because this
        process was stopped for longer than `stale`, a thread calls `lost` with a message; by
        default the process ends.
        """
        self.folder, self.file = Path(folder), Path(folder) / FILE
        self.beat, self.stale = beat or BEAT_SECONDS, stale or STALE_SECONDS
        self._patient = patient
        self._lost = lost or _end
        self.holder = Holder.present(what, self.stale)
        self._own = self.folder / f"{FILE}.{self.holder.token}"  # a file of this process
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._made: list[Path] = []  # folders that `acquire` created, innermost first

    def acquire(self) -> None:
        """Acquires the lock.

        Raises LockedError if another program holds it, or if no lock can be created in the folder.
        The lock of a process on another host is watched, for `stale` seconds at most, until the
        process touches it (it is alive) or it is stale: a run that died on one host may start again
        on another.
        """
        try:
            self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self._own, self.holder)
            try:
                self._take()
            finally:
                self._own.unlink(missing_ok=True)
        except OSError as error:
            raise LockedError(
                f"{self.folder} can't be used: {error.strerror or error}. It must be a folder that can be written to; "
                "mend its rights, or give another."
            ) from error
        self._thread = threading.Thread(target=self._keep, name="folder lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Releases the lock, and removes folders that `acquire` created if they are empty.

        In a forked copy of the process it does nothing.
        """
        if os.getpid() != self.holder.pid or self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError):
            if _holder_of(self.file) == self.holder:
                self.file.unlink()
            # a refused program leaves nothing behind; folders that are not empty stay
            for folder in self._made:
                folder.rmdir()

    def _take(self) -> None:
        seen: tuple[Holder | None, float] | None = None  # the lock when it was first looked at
        while not self._linked(self.file):
            try:
                found = _look(self.file)
            except FileNotFoundError:  # it was just released
                continue
            holder, touched = found
            age = self._server_time() - touched
            here = holder is not None and holder.here and not self._patient
            # one that touches it less often is given the time that it asks for
            stale = (
                self.stale if holder is None or not self._patient else max(self.stale, holder.stale)
            )
            if (holder is not None and holder.dead) or (age > stale and not here):
                if self._took_over(holder, age):
                    return
                continue
            if holder is not None and (here or (seen is not None and seen != found)):
                raise LockedError(
                    f"{self.folder} is in use by {holder}. Two would replace each other's files: give another folder, or wait "
                    f"for its end. (Should it be dead all the same: {self.file} may be deleted.)"
                )
            if seen is None:
                log.info(
                    "%s: %s may be alive there; waiting at most %.0f s to see it.",
                    self.folder,
                    _said(holder),
                    self.stale,
                )
            seen = seen or found
            time.sleep(LOOK_SECONDS)

    def _linked(self, file: Path) -> bool:
        """Creates `file` atomically, with this process's lock as its content; returns whether this
        process created it.
        """
        try:
            os.link(self._own, file)
        except FileExistsError:
            # Over NFS the reply to a successful link can get lost, and the repeated request fails.
            return os.stat(self._own).st_nlink == 2
        except OSError:  # no hard links on this file system
            return self._created(file)
        return True

    def _created(self, file: Path) -> bool:
        try:
            with file.open("x") as opened:
                json.dump(asdict(self.holder), opened)
        except FileExistsError:
            return False
        return _holder_of(file) == self.holder

    def _took_over(self, holder: Holder | None, age: float) -> bool:
        """Tries to replace a stale lock by this process's; returns whether it succeeded.

        `holder`: the process that the stale lock names, None if unknown; `age`: seconds since its
        last touch. A second lock file lets one process at a time try, otherwise a slower one would
        replace the lock of a faster one.
        """
        turn = self.folder / f"{FILE}.turn"
        if not self._linked(turn):
            with contextlib.suppress(FileNotFoundError):
                # left by a process that died within the lines below
                if self._server_time() - _look(turn)[1] > self.stale:
                    turn.unlink()
            time.sleep(LOOK_SECONDS / 10)
            return False
        try:
            if _holder_of(self.file) != holder:
                return False
            os.replace(self._own, self.file)
        except FileNotFoundError:
            return False
        finally:
            turn.unlink(missing_ok=True)
        log.warning(
            "%s: took over the lock of %s, which is dead (last sign %.0f s ago).",
            self.folder,
            _said(holder),
            age,
        )
        return _holder_of(self.file) == self.holder

    def _server_time(self) -> float:
        """Returns the current time of the file server, in seconds since the epoch."""
        os.utime(self._own)
        return os.stat(self._own).st_mtime

    def _keep(self) -> None:
        """Touches the lock file every `beat` seconds until the release; stops, and calls `lost`, if
        another program has taken over the lock.
        """
        while not self._ended.wait(self.beat):
            try:
                if not self._touch():
                    self._lost(
                        f"{self.folder}: {_said(_holder_of(self.file))} has taken over the lock: this one stood still."
                    )
                    return
            except OSError as error:  # a file server's may pass
                log.warning("%s: the lock can't be touched: %s", self.file, error)

    def _touch(self) -> bool:
        try:
            file = open(self.file)  # noqa: SIM115  of the `with` below
        except FileNotFoundError:  # another program deleted it
            _write(self._own, self.holder)
            try:
                return self._linked(self.file)
            finally:
                self._own.unlink(missing_ok=True)
        with file:
            if _parsed(file.read()) != self.holder:
                return False
            os.utime(file.fileno())  # this very file, whatever has its name by now
        return True


@contextmanager
def locked(
    folder: str | Path,
    what: str,
    *,
    beat: float | None = None,
    stale: float | None = None,
    patient: bool = False,
) -> Iterator[None]:
    """Holds a FolderLock on `folder` within a `with` block; `what` is the kind of program, such as
    "run"; `beat`, `stale` and `patient`: see FolderLock.
    Raises LockedError if another program holds the lock.
    """
    lock = FolderLock(folder, what, beat=beat, stale=stale, patient=patient)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def process_start(pid: int) -> int | None:
    """Returns when a process of this machine started, in clock ticks since the boot; None if it has
    ended.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _write(file: Path, holder: Holder) -> None:
    with file.open("w") as opened:
        json.dump(asdict(holder), opened)
        opened.flush()
        os.fsync(opened.fileno())


def _look(path: Path) -> tuple[Holder | None, float]:
    """Reads a lock file. Returns the process that it names as the holder (None if it can't be
    parsed, e.g. while it is written), and the time of its last touch.

    Opening a file makes an NFS client ask the server for its times, which it would otherwise cache
    for up to a minute.
    """
    with path.open(errors="replace") as file:
        return _parsed(file.read()), os.fstat(file.fileno()).st_mtime


def _holder_of(file: Path) -> Holder | None:
    return _look(file)[0]


def _parsed(text: str) -> Holder | None:
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _said(holder: Holder | None) -> str:
    return "an unknown program" if holder is None else str(holder)


def _end(reason: str) -> None:
    """Prints `reason` and ends the process without touching the folder, which another program has
    locked by now.
    """
    sys.stderr.write(f"error: {reason} It ends, lest two write there.\n")
    sys.stderr.flush()
    os._exit(1)
