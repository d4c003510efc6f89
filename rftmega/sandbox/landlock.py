"""File access control with Landlock (Linux 5.13), which needs no privileges; used if a private root
is not available.
"""

import ctypes
import os
from collections.abc import Iterable

from rftmega.sandbox import kernel

CREATE, ADD, RESTRICT = 444, 445, 446  # system calls, one number on every architecture
VERSION = 1  # flag of CREATE: only return the version
BENEATH = 1  # a rule about a path and all below it
READ = 0b1101  # execute, read a file, read a folder
WRITE_FILE = 0b10
MOST = (1 << 13) - 1  # all rights of the first version, including removing and creating
# version -> right that it added: moving between folders, truncating, ioctl of devices
LATER = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def restrict_files(*, own: str, readable: Iterable[str], devices: Iterable[str]) -> None:
    """Restricts this process to full access to the folder `own`, read access to the paths
    `readable`, and read and write access to `devices`.

    The process must have set no_new_privs. Raises OSError if the kernel has no Landlock.
    """
    version = kernel.system_call(CREATE, None, 0, VERSION)
    everything = MOST | sum(bit for since, bit in LATER.items() if version >= since)
    handled = (ctypes.c_uint64 * 1)(everything)
    rules = kernel.system_call(CREATE, handled, ctypes.sizeof(handled), 0)
    of_file = READ & ~0b1000 | WRITE_FILE
    for paths, allowed in (([own], everything), (readable, READ), (devices, of_file)):
        for path in paths:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = allowed if os.path.isdir(path) else allowed & of_file
            kernel.system_call(ADD, rules, BENEATH, ctypes.byref(_Rule(rights, parent)), 0)
            os.close(parent)
    kernel.system_call(RESTRICT, rules, 0)
    os.close(rules)
