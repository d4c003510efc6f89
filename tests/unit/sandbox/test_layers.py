"""Each layer of the sandbox by itself, while the others are off: what two layers refuse, either may
have forgotten.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rftmega.rewards.code import _environment


def python(program: str, said: str = "") -> str:
    """What a fresh interpreter writes that runs `program`."""
    command = [sys.executable, "-s", "-P", "-c", program]
    done = subprocess.run(
        command,
        input=said,
        capture_output=True,
        text=True,
        env=_environment(),
        cwd="/",
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def namespaces() -> None:
    if (
        python("from rftmega.sandbox import confine; confine.enter_namespaces(); print('in')")
        != "in\n"
    ):
        pytest.skip("this machine gives no namespaces")


@pytest.fixture
def listener() -> Iterator[int]:
    """A port of this machine where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def reached(port: int) -> str:
    return f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=30).close()
    print("reached")
except OSError as error:
    print("not", type(error).__name__)
"""


def test_the_network_namespace_alone_has_nobody_to_talk_to(namespaces: None, listener: int) -> None:
    assert python(reached(listener)) == "reached\n"
    inside = "from rftmega.sandbox import confine; confine.enter_namespaces()\n"
    assert python(inside + reached(listener)).startswith("not ")
    names = "import socket; print([name for _, name in socket.if_nameindex()])"
    assert python(inside + names) == "['lo']\n"


@pytest.mark.parametrize("kind", ["mnt", "net", "ipc", "uts"])
def test_each_namespace_is_a_new_one(kind: str, namespaces: None) -> None:
    where = f"import os; print(os.readlink('/proc/self/ns/{kind}'))\n"
    before, after = python(
        where + "from rftmega.sandbox import confine; confine.enter_namespaces()\n" + where
    ).split()
    assert before != after


def test_the_filter_alone_gives_no_socket_to_the_network(listener: int) -> None:
    install = (
        "from rftmega.sandbox import confine; assert confine.filter_system_calls(own_pid=None)\n"
    )
    assert python(install + reached(listener)) == "not PermissionError\n"
    assert (
        python(install + "import socket; socket.socketpair(); print('pairs work')")
        == "pairs work\n"
    )


def test_the_limits_alone_bound_memory_files_and_tasks() -> None:
    limit = f"from rftmega.sandbox import confine; confine.limit(seconds=30, memory={256 << 20})\n"
    greedy = "try:\n    print(len(bytearray(400 << 20)))\nexcept MemoryError:\n    print('refused')"
    assert python(greedy) == f"{400 << 20}\n"
    assert python(limit + greedy) == "refused\n"
    many = "import os\ntry:\n    [os.dup(0) for _ in range(300)]\n    print('all')\nexcept OSError:\n    print('refused')"
    assert (python(many), python(limit + many)) == ("all\n", "refused\n")
    write = """
import signal, tempfile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with tempfile.TemporaryFile() as file:
    try:
        file.truncate(1 << 30)
        print("all")
    except OSError:
        print("refused")
"""
    assert (python(write), python(limit + write)) == ("all\n", "refused\n")
