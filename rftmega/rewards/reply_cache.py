"""Cache of a judge's replies, so that each question is asked only once."""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

log = logging.getLogger(__name__)
MOST = 200_000  # answers in memory; the oldest are evicted first


class ReplyCache:
    """ReplyCache caches the replies of a judge model by request, in memory and optionally in a
    file, which several processes and runs may share.
    """

    def __init__(self, path: str = ""):
        """Loads the cached replies from the file `path`, if it exists: one line {"key": ...,
        "answer": ...} per reply; broken lines are skipped. "": caches in memory only.
        """
        self._path = path
        self._lock = threading.Lock()
        self._answers: dict[str, Future[str]] = {}
        if path and Path(path).is_file():
            self._read(Path(path))

    def answer(self, key: str, ask: Callable[[], str]) -> str:
        """Returns the cached reply for `key`, a text that identifies the request, or calls `ask`
        and caches its result.

        Concurrent calls with the same key wait for the first call. An exception of `ask` is raised
        in all of them and not cached.
        """
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        with self._lock:
            found = self._answers.get(digest)
            if found is None:
                mine = self._answers[digest] = Future()
                while len(self._answers) > MOST:
                    self._answers.pop(next(iter(self._answers)))
        if found is not None:
            return found.result()
        try:
            said = ask()
        except BaseException as error:
            with self._lock:
                self._answers.pop(digest, None)
            mine.set_exception(error)
            raise
        mine.set_result(said)
        self._write(digest, said)
        return said

    def _read(self, path: Path) -> None:
        broken = 0
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    held = json.loads(line)
                    digest, said = str(held["key"]), str(held["answer"])
                except (ValueError, LookupError, TypeError):
                    broken += 1
                    continue
                self._answers[digest] = Future()
                self._answers[digest].set_result(said)
        if broken:
            log.warning("reward.judge_cache: %d line(s) of %s can't be read.", broken, path)

    def _write(self, digest: str, said: str) -> None:
        """Appends the reply `said` to the file, under `digest`, the SHA-256 of its key. Writes the
        line at once, so that lines of several processes do not mix.
        """
        if not self._path:
            return
        line = json.dumps({"key": digest, "answer": said}).encode() + b"\n"
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            log.warning("reward.judge_cache: %s can't be written: %s.", self._path, error)
