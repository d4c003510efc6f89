"""`rftmega serve`: its servers are tests/scripted_server.py; real ones are in
tests/distributed/test_two_hosts.py.
"""

import asyncio
import os
import signal
import ssl
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rftmega import config as configuration
from rftmega.core.errors import EngineFault
from rftmega.rollout.servers import server as server_module
from rftmega.rollout.servers.connection import Disconnected
from rftmega.rollout.servers.server_client import ServerClient
from rftmega.rollout.servers.vllm import auth
from rftmega.tools import serve

pytest.importorskip("vllm")
KEY = "the key of the run"


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PROGRAM", "scripted_server")
    # not as tests.scripted_server: the package imports torch
    tests = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))
    monkeypatch.setenv(auth.KEY, KEY)


@pytest.fixture
def config_file(config_file: Path) -> Path:
    (config_file.parent / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return config_file


@contextmanager
def serving(
    config: Path, folder: Path, servers: int = 1, tls: tuple[str, str] | None = None
) -> Iterator[Path]:
    """Yields the server list of servers that run meanwhile."""
    server_list = folder / "shared" / "servers.txt"
    chosen = Namespace(
        listen="127.0.0.1",
        port=0,
        servers=servers,
        server_list=str(server_list),
        tls=tls,
        logs=str(folder),
    )
    ending = threading.Event()
    run = configuration.load(config, ["rollout.transport=network", "strategy=separate"])
    servers_of_host = serve.Servers(run, chosen, KEY)
    thread = threading.Thread(target=servers_of_host.run, args=(ending,))
    thread.start()
    try:
        yield server_list
    finally:
        ending.set()
        thread.join()


def addresses(server_list: Path) -> list[str]:
    return server_list.read_text().split() if server_list.exists() else []


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to be")


def client(address: str, tls: ssl.SSLContext | None = None) -> ServerClient:
    return ServerClient(address, auth.headers(KEY), tls=tls)


def test_servers_are_in_the_server_list_while_they_answer(
    config_file: Path, tmp_path: Path
) -> None:
    with serving(config_file, tmp_path, servers=2) as server_list:
        wait_until(lambda: len(addresses(server_list)) == 2)
        server_list.write_text(
            server_list.read_text() + "http://10.0.0.9:8100\n"
        )  # of another host
        first, second, _ = addresses(server_list)
        os.kill(int(client(first).told("/identity")["identity"].partition("-")[0]), signal.SIGKILL)
        wait_until(lambda: first not in addresses(server_list))
        wait_until(lambda: len(addresses(server_list)) == 3)  # it has started again
        assert {second, "http://10.0.0.9:8100"} < set(addresses(server_list))
        assert all(client(each).there() for each in addresses(server_list) if "10.0" not in each)
        ours = [each for each in addresses(server_list) if "10.0" not in each]
    assert addresses(server_list) == ["http://10.0.0.9:8100"]
    assert not any(client(each).there() for each in ours)


def test_a_server_that_would_never_come_up_ends_all(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refuses.py").write_text("raise SystemExit(2)")  # as argparse ends
    monkeypatch.setattr(server_module, "PROGRAM", "refuses")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    chosen = Namespace(
        listen="127.0.0.1", port=0, servers=1, server_list=None, tls=None, logs=str(tmp_path)
    )
    servers = serve.Servers(configuration.load(config_file, []), chosen, KEY)
    ending = threading.Event()
    limit = threading.Timer(60, ending.set)
    limit.start()
    with pytest.raises(server_module.EngineError, match="did not come up"):
        servers.run(ending)
    limit.cancel()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "rollout.transport=shared_memory is not for servers of"),
        (["rollout.transport=network", "--tls", "no.pem", "no.key"], "--tls no.pem is no file"),
    ],
)
def test_what_can_not_be_served_is_one_line_and_exit_code_2(
    given: list[str], said: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main([str(config_file), "--listen", "127.0.0.1", *given]) == 2
    assert said in capsys.readouterr().err


def test_the_former_name_of_the_server_list_is_refused_with_the_new_one(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve.main([str(config_file), "--listen", "127.0.0.1", "--roster", "servers.txt"])
    assert "--roster is now --server-list" in capsys.readouterr().err


def test_without_a_key_nothing_starts(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(auth.KEY)
    assert serve.main([str(config_file), "--listen", "127.0.0.1"]) == 2
    assert f"{auth.KEY} is not set" in capsys.readouterr().err


def certificate(folder: Path, name: str, subject: str) -> tuple[str, str]:
    """Returns the files of a certificate that signs itself, and of its key."""
    files = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={subject}"]
    subprocess.run(
        [*command.split(), *names, "-out", files[0], "-keyout", files[1]],
        check=True,
        capture_output=True,
    )
    return files


def answered(server: ServerClient) -> list[int]:
    """Returns the tokens of one completion over the server's WebSocket."""

    async def asked() -> list[int]:
        connection = server.connections().socket
        try:
            completion = await connection.ask([3, 4], {"seed": 7})
        finally:
            await connection.close()
        return list(memoryview(completion.token_ids).cast("i"))

    return asyncio.run(asked())


def test_over_tls_a_server_is_believed_by_its_certificate_alone(
    config_file: Path, tmp_path: Path
) -> None:
    own = certificate(tmp_path, "server", "IP:127.0.0.1")
    other, _ = certificate(tmp_path, "other", "IP:127.0.0.1")
    with serving(config_file, tmp_path, tls=own) as server_list:
        wait_until(lambda: bool(addresses(server_list)))
        (address,) = addresses(server_list)
        assert address.startswith("https://127.0.0.1:")
        right = client(address, ssl.create_default_context(cafile=own[0]))
        right.post("resume")
        assert right.there() and answered(right) == [3, 4, 7]
        for believed in (ssl.create_default_context(cafile=other), None):  # another's; the system's
            wrong = client(address, believed)
            assert not wrong.there()
            with pytest.raises(EngineFault, match="CERTIFICATE_VERIFY_FAILED"):
                wrong.post("resume")
            with pytest.raises(Disconnected):
                answered(wrong)
        assert not client(address.replace("https", "http")).there()


def test_where_a_certificate_is_of_another_host_the_trainer_refuses_and_its_own_host_does_not(
    config_file: Path, tmp_path: Path
) -> None:
    own = certificate(tmp_path, "elsewhere", "IP:10.0.0.9")
    with serving(config_file, tmp_path, tls=own) as server_list:
        wait_until(lambda: bool(addresses(server_list)))
        (address,) = addresses(server_list)
        trainer = client(address, ssl.create_default_context(cafile=own[0]))
        with pytest.raises(EngineFault, match="IP address mismatch"):
            trainer.post("resume")
