"""A trainer on one host, a vLLM server on another: two network namespaces of this machine."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from rftmega.config import ParallelConfig
from rftmega.core.errors import EngineFault
from rftmega.rollout.servers.vllm import auth
from tests.distributed.test_servers_push import Trainer
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.two_hosts import MAY, TwoHosts, two_hosts

KEY = "of this test"


def server_of(
    hosts: TwoHosts, folder: Path, model: Path, servers: int = 1
) -> "subprocess.Popen[bytes]":
    """Runs `rftmega serve` on the other host."""
    rollout = {
        "max_prompt_tokens": 32, "max_response_tokens": 12, "cpu_cache_gib": 0.05, "max_batch": 8,
        "transport": "network",
    }  # fmt: skip
    run = {"model": {"path": str(model), "dtype": "float32"}, "rollout": rollout}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    serve = [sys.executable, "-m", "rftmega", "serve", str(folder / "run.yaml")]
    serve += ["--listen", hosts.there, "--server-list", str(folder / "server_list")]
    serve += ["--logs", str(folder / "logs"), "--servers", str(servers)]
    with (folder / "serve.log").open("w") as said:
        return subprocess.Popen(
            hosts.command(*serve), env=os.environ | {auth.KEY: KEY}, stdout=said, stderr=said
        )


def trainer_body(world: Any, folder: Path, model: Path, hosts: TwoHosts) -> Any:
    from rftmega.rollout.servers import server_engine

    os.environ[auth.KEY] = KEY
    server_engine.MESSAGE_SECONDS = 5.0
    server_list = folder / "server_list"
    while not (server_list.exists() and server_list.read_text()):
        time.sleep(0.2)
    parallel = ParallelConfig(tensor=2, sequence=True)
    trainer = Trainer(
        world,
        model,
        folder,
        parallel,
        transport="network",
        server_list=str(server_list),
        listen=hosts.here,
    )
    weights, seen = trainer.weights, {}

    def until_pushed(version: int) -> Any:
        for _ in range(300):
            with suppress(EngineFault):
                return weights.push(version=version)
            time.sleep(0.5)
        raise AssertionError("the server did not come back")

    try:
        seen["first"] = (weights.push(version=0)["push_ratio"], trainer.gap())
        trainer.change(0.9)
        real, written = weights._written, []

        def cut(*given: Any) -> Any:
            written.append(given)
            if world.rank == 0 and len(written) == 4:
                hosts.cut()
            return real(*given)

        weights._written = cut
        try:
            weights.push(version=1)
        except EngineFault as fault:
            seen["cut"] = str(fault)
        weights._written = real
        if world.rank == 0:
            hosts.join()
        dist.barrier()
        until_pushed(1)
        seen["joined again"] = trainer.gap()
        trainer.change(0.9)
        if world.rank == 0:
            (pid,) = (int(line) for line in (folder / "pid").read_text().split())
            for child in psutil.Process(pid).children(recursive=True):
                if "api_server" in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGKILL)
                    break
        dist.barrier()
        until_pushed(2)
        seen["started again"] = trainer.gap()
    finally:
        trainer.engine.close()
    return seen


@pytest.mark.ranks
@pytest.mark.skipif(not MAY, reason="needs root and iproute2, to make a second host")
def test_a_server_on_another_host_follows_the_trainer_over_cuts_and_deaths(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    with two_hosts() as hosts:
        serving = server_of(hosts, tmp_path, model)
        (tmp_path / "pid").write_text(str(serving.pid))
        try:
            found = run_ranks(2, trainer_body, tmp_path, model, hosts, timeout=400)
        finally:
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(60) == 0
    assert not (tmp_path / "server_list").read_text(), "who ends takes its address away"
    for seen in found:
        ratio, (gap, versions) = seen["first"]
        assert (ratio, versions) == (1, {0}) and gap < 1e-5
        assert "No server" in seen["cut"] and "push 1" in seen["cut"]
        for name, version in (("joined again", 1), ("started again", 2)):
            gap, versions = seen[name]
            assert gap < 1e-5 and versions == {version}


def slow_link_body(world: Any, folder: Path, model: Path, hosts: TwoHosts) -> Any:
    """Pushes from four processes to two servers over 40 megabits a second: what went over the wire."""
    os.environ[auth.KEY] = KEY
    server_list = folder / "server_list"
    while not (server_list.exists() and len(server_list.read_text().splitlines()) == 2):
        time.sleep(0.2)
    trainer = Trainer(
        world,
        model,
        folder,
        ParallelConfig(tensor=2, pipeline=2),
        transport="network",
        server_list=str(server_list),
        listen=hosts.here,
    )
    seen = []
    try:
        for version in range(2):
            if world.rank == 0:
                hosts.limit(40)
            dist.barrier()
            before = hosts.sent()
            metrics = trainer.weights.push(version=version)
            sent = hosts.sent() - before
            seen.append((metrics, sent, trainer.gap()))
            trainer.change(0.9)
    finally:
        trainer.engine.close()
    return seen


@pytest.mark.ranks
@pytest.mark.skipif(not MAY, reason="needs root and iproute2, to make a second host")
def test_two_servers_get_the_least_of_bytes_from_a_trainer_of_four_over_a_slow_link(
    tmp_path: Path,
) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    whole = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    with two_hosts() as hosts:
        serving = server_of(hosts, tmp_path, model, servers=2)
        try:
            found = run_ranks(4, slow_link_body, tmp_path, model, hosts, timeout=500)
        finally:
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(60) == 0
    for seen in found:
        for version, (metrics, sent, (gap, versions)) in enumerate(seen):
            assert gap < 1e-5 and versions == {version}
            assert metrics["push_ratio"] == 1 and metrics["push_missed"] == 0
            assert metrics["servers_healthy"] == 2
            # each server gets every byte once; headers of TCP and messages are beside
            assert 2 * whole <= sent < 2.2 * whole + 200_000
