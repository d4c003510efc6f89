"""Reads the server list, a file of servers' addresses that people and programs edit while it is read."""

from pathlib import Path
from typing import NamedTuple

from rftmega.config.addresses import address_of


class ServerListLook(NamedTuple):
    """ServerListLook is what a server list said: addresses, each once, and what could not be read."""

    addresses: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_server_list(file: Path) -> ServerListLook:
    """Reads addresses, one a line; what is behind a # is a comment. There are none where there is no
    file yet.
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
