import os
import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from rftmega.core.errors import NodeError, NodeFault, exit_code_of
from rftmega.runtime.parallel import rendezvous

SOON = timedelta(seconds=20)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free))
    return free


def test_the_store_listens_at_its_address_alone_and_answers(port: int) -> None:
    served = rendezvous.store(0, 2, SOON)
    listens = {
        held.laddr.ip
        for held in psutil.Process().net_connections("inet")
        if held.laddr.port == port and not held.raddr
    }
    assert listens == {"127.0.0.1"}
    asked = rendezvous.store(1, 2, SOON)
    asked.set("a", "b")
    assert served.get("a") == b"b"


def test_torchs_own_store_listens_everywhere() -> None:
    """Why there is one of ours."""
    served = dist.TCPStore("127.0.0.1", 0, 1, True, SOON, wait_for_workers=False)
    held = [
        held
        for held in psutil.Process().net_connections("inet")
        if held.laddr.port == served.port and not held.raddr
    ]
    assert {one.laddr.ip for one in held} <= {"::", "0.0.0.0"}


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_host_is_refused(
    address: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(
        NodeError, match=f"can't listen at MASTER_ADDR={address}, MASTER_PORT={port}"
    ) as caught:
        rendezvous.store(0, 1, SOON)
    assert not isinstance(caught.value, NodeFault)


def test_a_port_that_another_process_has_may_be_free_at_the_next_start(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(NodeFault, match=f"MASTER_PORT={port}: .*in use"),
    ):
        rendezvous.store(0, 2, SOON)
    assert exit_code_of(ends_by, NodeFault) == 1
    assert exit_code_of(ends_by, NodeError) == 2


def ends_by(error: type[NodeError]) -> int:
    raise error("...")


def test_a_name_that_is_loopback_only_on_its_own_host_is_refused(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian writes a host's own name into its hosts file."""
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: [here])
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(NodeError, match="MASTER_ADDR=node1 is 127.0.1.1 on its own host"):
        rendezvous.store(0, 4, SOON)


def test_collectives_keep_to_the_interface_towards_the_first_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in rendezvous.INTERFACE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    rendezvous.choose_interface("no-such-host.invalid", alone=False)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    rendezvous.choose_interface("127.0.0.1", alone=False)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
