"""Shares memory between processes of one host under unique names.

The memory has no path in any folder, so nothing is left behind however the processes end: other
processes reach it through its owner's open files (/proc). Its size is sealed: a process that opens
it can neither shrink nor enlarge it.
"""

import fcntl
import mmap
import os
import re
import secrets

# the owner's process id, its descriptor, a random number
NAME = re.compile(r"rftmega-(\d{1,10})-(\d{1,7})-([0-9a-f]{32})")
SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def create(size: int) -> str:
    """Creates shared memory of `size` bytes and returns its name.

    It is freed once this process has closed it and no process has it mapped or open.
    """
    token = secrets.token_hex(16)
    descriptor = os.memfd_create(f"rftmega-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return f"rftmega-{os.getpid()}-{descriptor}-{token}"


def close(name: str) -> None:
    """Closes shared memory that this process created; processes that have mapped it can still use
    it.
    """
    found = NAME.fullmatch(name)
    assert found is not None and int(found[1]) == os.getpid(), name
    os.close(int(found[2]))


def attach(name: str, size: int) -> mmap.mmap:
    """Maps the shared memory called `name`, of `size` bytes, which any process of this host may
    have created.

    Raises ValueError as `opened` does.
    """
    descriptor = opened(name, size)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def opened(name: str, size: int) -> int:
    """Opens the shared memory called `name` and returns a file descriptor.

    Raises ValueError unless the memory was made by `create`, belongs to this user and has `size`
    bytes.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no name of shared memory of ours")
    pid, number, token = found.groups()
    path, wanted = f"/proc/{pid}/fd/{number}", f"/memfd:rftmega-{token} (deleted)"
    try:
        # before it is opened: opening a pipe or a device may have effects
        if os.readlink(path) != wanted:
            raise ValueError(f"{name!r} is other memory by now")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{name!r} can't be opened: {error.strerror}") from error
    try:
        about = os.fstat(descriptor)
        same = os.readlink(f"/proc/self/fd/{descriptor}") == wanted and about.st_nlink == 0
        if not same or about.st_uid != os.geteuid() or about.st_size != size:
            raise ValueError(f"{name!r} is not memory of this user, of {size} bytes")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"{name!r} is not sealed")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
