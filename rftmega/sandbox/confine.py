"""Irrevocably drops the privileges that tested code must not have, for this process and its
children.
"""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping

from rftmega.sandbox import kernel, landlock, system_calls

TASKS = 16  # processes and threads together
OPEN_FILES = 128
DISK = 64 << 20  # bytes: maximum of one file; with namespaces, of all files together
FILES = 4096
WORK = "/answer"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
# one per run, so that runs neither count nor signal each other; no real user has such ids
FIRST_USER = 1_900_000_000


def enter_namespaces() -> None:
    """Enters new namespaces for users (unless root), mounts, processes, network, IPC and host name;
    the next process forked becomes process 1.

    Raises OSError if the kernel, or a container's policy, does not allow all of them.
    """
    flags = (
        kernel.CLONE_NEWNS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
    )
    user, group = os.getuid(), os.getgid()
    if user == 0:
        kernel.unshare(flags)
        return
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise the maps below belong to root
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def enter_private_root(box: str) -> None:
    """Makes `box`, an empty folder, this process's root, with Python and system libraries,
    read-only, and an empty folder WORK.

    Raises OSError if a mount is not allowed.
    """
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    plain = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", box, "tmpfs", plain, "size=1m,mode=755")
    for path in _visible():
        inside = box + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            open(inside, "w").close()
        kernel.mount(path, inside, None, kernel.MS_BIND | kernel.MS_REC)
        if path not in DEVICES:
            kernel.read_only(inside)
    os.mkdir(box + WORK)
    for name in ("/tmp", "/dev/shm"):
        if not os.path.lexists(box + name):  # Python itself may be installed below /tmp
            os.symlink(WORK, box + name)
    kernel.mount("tmpfs", box + WORK, "tmpfs", plain, f"size={DISK},nr_inodes={FILES},mode=1777")
    kernel.mount(None, box, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | plain)
    os.chroot(box)
    os.chdir(WORK)


def _visible() -> Iterator[str]:
    yield from (path for path in (*SYSTEM, *DEVICES) if os.path.lexists(path))
    covered = [path + "/" for path in SYSTEM if not os.path.islink(path)]
    for prefix in dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix)):
        if not any(f"{prefix}/".startswith(path) for path in covered):
            covered.append(prefix + "/")
            yield prefix
    if os.path.realpath(sys.prefix) != sys.prefix:
        yield sys.prefix


def python_folders() -> list[str]:
    """Returns the folders of Python and its packages that are outside the system's folders (such as
    /usr).
    """
    return [path for path in _visible() if path not in SYSTEM and path not in DEVICES]


def limit(*, seconds: float, memory: int) -> None:
    """Sets the resource limits of this process and each of its children: `seconds` of CPU time,
    `memory` bytes of address space, and limits of file size, open files and tasks.

    The limit of tasks counts all processes and threads of the user (or namespace) together.
    """
    tasks = TASKS if os.getuid() == 0 else TASKS + _tasks_of(os.getuid())
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_FSIZE, DISK),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _tasks_of(user: int) -> int:
    """Returns the number of threads that the user id `user` has already, as counted by the limit of
    tasks.

    0 in a new namespace, where /proc is not visible.
    """
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == user:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def drop_privileges(user: int) -> None:
    """Switches to the user id `user` if this process runs as root, and drops all capabilities in
    any case.
    """
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # setuid would have cleared it


def filter_system_calls(*, own_pid: int | None) -> bool:
    """Installs the system call filter of system_calls.py; `own_pid`: the only process that may
    receive signals, None: any.

    Returns whether it was installed: False if the kernel or architecture does not support it.
    """
    try:
        system_calls.install(own_pid=own_pid)
    except (OSError, KeyError):
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        return False
    return True


def restrict_files(own: str, opened: Mapping[str, int] | None = None) -> bool:
    """Restricts file access to the folder `own` and the files that a private root would show.
    Folders in `opened` (folder -> descriptor) are allowed through their descriptors.

    Returns whether access was restricted: False if the kernel has no Landlock.
    """
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    try:
        readable = [path for path in _visible() if path not in DEVICES and _may_open(path)]
        readable += [f"/proc/self/fd/{descriptor}" for descriptor in (opened or {}).values()]
        landlock.restrict_files(own=own, readable=readable, devices=DEVICES)
    except OSError:
        return False
    return True


def _may_open(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_PATH))
    except OSError:
        return False
    return True


def keep_only(descriptors: list[int]) -> None:
    """Closes all file descriptors above 2 except `descriptors`."""
    edges = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
    for low, high in zip(edges, edges[1:], strict=False):
        os.closerange(low + 1, high)
