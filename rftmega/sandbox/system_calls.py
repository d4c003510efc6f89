"""System call filter (seccomp, classic BPF): system calls that tested code does not need fail with
EPERM.
"""

import ctypes
import errno
import os

from rftmega.sandbox import kernel

# Name: number on x86-64, on 64-bit ARM. Ways around the limits (namespaces, memory that no limit
# counts), into other processes, and parts of the kernel that are best left alone.
DENIED = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442), "memfd_create": (319, 279), "shmget": (29, 194),
    "msgget": (68, 186), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "kexec_load": (246, 104),
}  # fmt: skip
# has its flags in memory, which a filter cannot read; without it, libc uses clone
CLONE3 = (435, 435)
SOCKET, CLONE, KILL, TKILL, TGKILL = (41, 198), (56, 220), (62, 129), (200, 130), (234, 131)
# machine -> column above, AUDIT_ARCH
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32 = 0x40000000  # numbers from here on are the x32 table of x86-64
AF_UNIX = 1

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, FAIL = 0x7FFF0000, 0x00050000
Step = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def program(machine: str, *, own_pid: int | None) -> list[Step]:
    """Returns the filter's BPF instructions for an architecture (`machine`, as in os.uname).

    `own_pid`: the only process that may receive signals, needed if this process shares its user id
    with other processes; None: any process. Raises KeyError for an unknown architecture.
    """
    column, architecture = ARCHITECTURES[machine]
    refuse: Step = (RETURN, 0, 0, FAIL | errno.EPERM)
    allow: Step = (RETURN, 0, 0, ALLOW)
    steps: list[Step] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), refuse]
    steps += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), refuse]
    for numbers in DENIED.values():
        steps += [(EQUAL, 0, 1, numbers[column]), refuse]
    steps += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    steps += [
        (EQUAL, 0, 4, SOCKET[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 1, AF_UNIX),
        allow,
        refuse,
    ]
    steps += [
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 1, 0, kernel.CLONE_NEWUSER),
        allow,
        refuse,
    ]
    if own_pid is not None:
        for numbers in (KILL, TKILL, TGKILL):
            steps += [
                (EQUAL, 0, 4, numbers[column]),
                (LOAD, 0, 0, FIRST_ARGUMENT),
                (EQUAL, 0, 1, own_pid),
                allow,
                refuse,
            ]
    return [*steps, allow]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]


def install(*, own_pid: int | None) -> None:
    """Installs the filter for this process and its children, irrevocably.

    `own_pid`: see `program`. Raises OSError or KeyError if this system does not support the filter.
    """
    steps = program(os.uname().machine, own_pid=own_pid)
    packed = b"".join(
        code.to_bytes(2, "little") + bytes([yes, no]) + constant.to_bytes(4, "little")
        for code, yes, no, constant in steps
    )
    memory = ctypes.create_string_buffer(packed, len(packed))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, _Filter(len(steps), ctypes.addressof(memory)))
