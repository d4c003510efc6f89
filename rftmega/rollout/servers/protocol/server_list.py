"""Reads the server list, a file of remote servers' addresses that a user may edit during a run."""

from pathlib import Path
from typing import NamedTuple

from rftmega.config.addresses import address_of


class ServerListLook(NamedTuple):
    """ServerListLook is the content of a server list when it was read: the addresses without
    duplicates, and messages about invalid lines or an unreadable file.
    """

    addresses: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_server_list(file: Path) -> ServerListLook:
    """Reads the server addresses in `file`, one per line; # starts a comment. Returns no addresses
    if the file is missing.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        return ServerListLook()
    except OSError as error:
        return ServerListLook(problems=(f"{file} can't be read: {error.strerror or error}",))
    found, problems = dict[str, None](), []
    for number, line in enumerate(text.splitlines(), start=1):
        told = line.partition("#")[0].strip()
        if not told:
            continue
        try:
            found[address_of(told)] = None
        except ValueError as error:
            shown = told.rpartition("@")[2][:80]  # no password
            problems.append(
                f"{file}:{number}: {shown!r} is left out, which is no address as http://10.0.0.2:8100: {error}."
            )
    return ServerListLook(tuple(found), tuple(problems))
