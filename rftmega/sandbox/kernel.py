"""Wrappers of system calls that Python does not provide. Each wrapper raises OSError if the kernel
refuses the call.
"""

import ctypes
import os
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 18,
)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    22,
    36,
    38,
)
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # one number on every architecture
CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _done(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def system_call(number: int, *arguments: Any) -> int:
    """Makes the system call with this number, for which libc has no function, and returns its
    result; integers are passed as C longs.
    """
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = _libc.syscall(ctypes.c_long(number), *given)
    _done(result, f"system call {number}")
    return result


def unshare(flags: int) -> None:
    _done(_libc.unshare(flags), "unshare")


def prctl(
    option: int, value: int | ctypes.Array | ctypes.Structure, more: ctypes.Structure | None = None
) -> None:
    third = ctypes.byref(more) if more is not None else ctypes.c_ulong(0)
    zero = ctypes.c_ulong(0)
    _done(
        _libc.prctl(
            option, ctypes.c_ulong(value) if isinstance(value, int) else value, third, zero, zero
        ),
        f"prctl {option}",
    )


def mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [
        text.encode() if text is not None else None for text in (source, target, kind, options)
    ]
    _done(
        _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]),
        f"mount {target}",
    )


def read_only(target: str) -> None:
    """Makes a mount and everything below it read-only, and disables devices and set-user-id
    programs there (Linux 5.12).
    """
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    system_call(
        MOUNT_SETATTR,
        AT_FDCWD,
        target.encode(),
        AT_RECURSIVE,
        attributes,
        ctypes.sizeof(attributes),
    )


def drop_capabilities() -> None:
    """Drops all capabilities of this process, in any user namespace."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    _done(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
