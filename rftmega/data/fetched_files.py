"""Downloads images and videos into a folder before a run begins; downloads each file once."""

import hashlib
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rftmega.core.errors import DataError
from rftmega.data.media.files import MOST_BYTES

FOLDER = "fetched"  # subfolder of the media folder
THREADS = 8
TIMEOUT = 30.0  # seconds without data
LOOK = 0.1  # seconds between checks of another process's download
ABANDONED = 120.0  # seconds without data after which a download counts as abandoned
PART = 2**20


class Fetched:
    """Fetched downloads files into a folder that several processes share: one process downloads a
    file while the others wait for it.
    """

    def __init__(self, folder: Path, hosts: Collection[str]):
        """`folder`: files are stored in its subfolder FOLDER. `hosts`: names of the hosts from
        which files may be downloaded; redirects to other hosts are refused.
        """
        self.folder, self.hosts = folder / FOLDER, frozenset(hosts)
        self._failed: dict[str, DataError] = {}
        self._opener = urllib.request.build_opener(_SameHosts(self))

    def ahead(self, addresses: Iterable[str]) -> None:
        """Downloads the files of all URLs, up to THREADS at a time. If a download fails, `file`
        raises its error later.
        """
        distinct = list(dict.fromkeys(addresses))
        with ThreadPoolExecutor(THREADS) as pool:
            done = pool.map(self._try, distinct)
            for _ in tqdm(done, "fetched", len(distinct), disable=len(distinct) < THREADS):
                pass

    def file(self, address: str) -> Path:
        """Returns the path of a URL's downloaded file, which has the URL's file extension.
        Downloads the file if it is missing.

        Raises DataError if the URL's host is not among `hosts`, or the download fails.
        """
        self.check(address)
        if address in self._failed:
            raise self._failed[address]
        name = hashlib.sha256(address.encode()).hexdigest()[:32]
        ending = Path(urllib.parse.urlsplit(address).path).suffix.lower()
        target = self.folder / (name + ending if ending[1:].isalnum() else name)
        claim = self.folder / f"{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not target.is_file():
                if self._is_mine(claim):
                    self._fetch(address, target, claim)
                else:
                    time.sleep(LOOK)
        except OSError as error:
            raise DataError(
                f"{address} can't be kept in {self.folder}: {error.strerror or error}. Set data.media_folder to a folder "
                "that can be written to."
            ) from error
        return target

    def check(self, address: str) -> None:
        """Raises DataError unless `address` is an http or https URL of an allowed host."""
        try:
            parts = urllib.parse.urlsplit(address)
            host = parts.hostname
        except ValueError as error:
            raise DataError(f"{address!r} is no address: {error}.") from None
        if parts.scheme not in ("http", "https") or host not in self.hosts:
            known = ", ".join(sorted(self.hosts)) or "none"
            raise DataError(
                f"{address} is not fetched: its host is not among data.media_hosts ({known}). "
                "Add it, or download the file and give the path."
            )

    def _try(self, address: str) -> None:
        try:
            self.file(address)
        except DataError as error:
            self._failed[address] = error

    def _is_mine(self, claim: Path) -> bool:
        """Returns whether this process must download a file: True if it created the file `claim`,
        False if another process did so first. Removes a claim that its process has abandoned, so
        that a later call can return True.
        """
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            pass
        try:
            if time.time() - claim.stat().st_mtime > ABANDONED:
                claim.unlink()
        except FileNotFoundError:  # downloaded meanwhile, or failed
            pass
        return False

    def _fetch(self, address: str, target: Path, claim: Path) -> None:
        try:
            self._write(address, claim)
            claim.replace(target)
        except (DataError, OSError, ValueError) as error:
            claim.unlink(missing_ok=True)
            if isinstance(error, DataError):
                raise
            why = getattr(error, "reason", None) or error
            raise DataError(f"{address} can't be fetched: {why}.") from error

    def _write(self, address: str, claim: Path) -> None:
        request = urllib.request.Request(address, headers={"User-Agent": "rftmega"})
        with self._opener.open(request, timeout=TIMEOUT) as response, claim.open("wb") as file:
            size = 0
            while part := response.read(PART):
                size += len(part)
                if size > MOST_BYTES:
                    raise DataError(
                        f"{address} has more than {MOST_BYTES:,} bytes, which is too large. Make it smaller."
                    )
                file.write(part)
                file.flush()
            said = response.headers.get("Content-Length")
            if said is not None and size != int(said):
                raise DataError(f"{address} broke off: {size:,} of {int(said):,} bytes came.")


class _SameHosts(urllib.request.HTTPRedirectHandler):
    """_SameHosts follows redirects to allowed hosts only."""

    def __init__(self, fetched: Fetched):
        self._fetched = fetched

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        self._fetched.check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
