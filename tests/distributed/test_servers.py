"""A real vLLM server beside the trainer's processes: weights through shared memory, prompts over
HTTP, faults on the way.
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.core.types import Prompt, Sampling
from rftmega.rollout.servers.vllm import auth
from rftmega.weights.transports.shared_weights import SharedWeights
from tests.layouts import build_actor, rows_of
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import save_tiny

PRELOADED = VLLM

PROMPTS = [
    Prompt((5, 9, 100)),
    Prompt((3,)),
    Prompt((5, 9, 100, 7, 7, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)),
]
TEMPERATURE = 0.7


def server_body(world: Any, folder: Path, logs: Path) -> Any:
    from rftmega.rollout.engines import vllm_models
    from rftmega.rollout.servers.server_engine import ServerEngine

    vllm_models.CPU_STEP_TOKENS = 45  # one and a half of `longer`
    actor = build_actor(
        folder,
        ParallelConfig(tensor=2, sequence=True, expert=2),
        temperature=TEMPERATURE,
        token_cap=512,
    )
    config = RolloutConfig(
        max_prompt_tokens=32, max_response_tokens=12, cpu_cache_gib=0.05, max_batch=8
    )
    engine = ServerEngine(folder, config, world, dtype="float32", stop_ids=[1], logs=logs)
    weights = engine.weight_sync(actor.manager.shards(), bucket_bytes=20_000)
    assert isinstance(weights, SharedWeights)
    assert len(weights.buckets) > 10

    def refusal(version: int) -> str:
        with pytest.raises(EngineError) as caught:
            weights.push(version=version)
        with pytest.raises(EngineError, match="holds no weights"):
            engine.generate(PROMPTS, seeds=[1, 2, 3], sampling=Sampling(TEMPERATURE))
        return str(caught.value)

    def gap(version: int) -> tuple[float, list[tuple[int, ...]]]:
        metrics = weights.push(version=version)
        assert metrics["push_bytes"] == metrics["push_bytes_least"] == weights.total_bytes
        completions = engine.generate(PROMPTS, seeds=[1, 2, 3], sampling=Sampling(TEMPERATURE))
        told: list[Any] = [completions]
        torch.distributed.broadcast_object_list(told)
        (completions,) = told
        rows = rows_of(
            [[*p.token_ids, *a.token_ids] for p, a in zip(PROMPTS, completions, strict=True)],
            [len(p.token_ids) for p in PROMPTS],
        )
        logp = actor.log_probs(rows).logp[rows.mask]
        assert {a.policy_version for a in completions} == {version}
        return (
            logp - torch.tensor([x for a in completions for x in a.logprobs])
        ).abs().max().item(), [a.token_ids for a in completions]

    found: dict[str, Any] = {
        "first": gap(0),
        "intact": all(each.intact for each in weights.checksums()),
    }
    with torch.no_grad():
        for item in actor.manager.bound:
            item.parameter.mul_(0.9)
    stale = [each.name for each in weights.checksums() if each.held != each.sent]
    found["stale"] = sorted(stale) == sorted(
        place.name for bucket in weights.buckets for place in bucket.places
    )
    found["second"] = gap(1)
    longer = [Prompt((5, 9, *range(2 + place, 30 + place))) for place in range(3)]
    asked: list[Any] = [longer, *([prompt] for prompt in longer)]
    found["longer"] = [
        engine.generate(prompts, seeds=[3] * len(prompts), sampling=Sampling(TEMPERATURE))
        for prompts in asked
    ]
    if world.rank == 0:
        within = psutil.Process(engine.servers[0]._process.pid).children(recursive=True)
        found["names"] = [
            name for each in within for name in each.cmdline()[:1] if "VLLM::" in name
        ]
        found["from outside"] = from_outside(engine, logs)
        (member,) = engine.server_group.members
        member.health.failed()
        member.paused = True
        engine.server_group.probe(member)
        found["probed"] = str(member.state)
    real = weights._write
    weights._write = lambda bucket, memory: [each + 1 for each in real(bucket, memory)]  # type: ignore[method-assign]
    found["damaged"] = refusal(2)
    weights._write = real  # type: ignore[method-assign]
    dropped = weights.buckets.pop()
    found["too few bytes"] = refusal(3)
    whole = weights.total_bytes
    # nor does the trainer notice
    weights.total_bytes -= sum(torch.Size(place.shape).numel() * 4 for place in dropped.places)
    found["incomplete"] = refusal(3)
    weights.total_bytes = whole
    weights.buckets.append(dropped)
    found["repeated"] = gap(4)

    def dying(bucket: Any, memory: torch.Tensor) -> list[int]:
        if world.rank == 0:
            os.kill(engine.servers[0]._process.pid, signal.SIGKILL)
        return real(bucket, memory)

    weights._write = dying  # type: ignore[method-assign]
    found["killed"] = refusal(5)
    engine.close()
    return found


def from_outside(engine: Any, logs: Path) -> dict[str, Any]:
    """What another user of the host comes to, and what a request with the key can make a worker
    open.
    """
    (server,) = engine.servers
    key = engine._environment[auth.KEY]
    paths = [
        "docs",
        "openapi.json",
        "metrics",
        "v1/models",
        "collective_rpc",
        "sleep",
        "health",
        "update_weights",
        "pause",
    ]
    statuses: dict[bool, set[int]] = {False: set(), True: set()}
    with httpx.Client(base_url=server.address) as client:
        for path in paths:
            for method in ("GET", "POST", "OPTIONS"):
                statuses[False].add(client.request(method, f"/{path}").status_code)
                if f"/{path}" not in auth.PATHS:
                    reply = client.request(method, f"/{path}", headers=auth.headers(key))
                    statuses[True].add(reply.status_code)
    victim = logs / "victim"
    victim.write_bytes(b"thesis")
    refused = []
    for memory in (str(victim), str(logs / "missing"), f"/proc/{os.getpid()}/fd/0"):
        engine.begin()  # a worker that failed has ended it
        bucket = {"version": 9, "last": False, "memory": memory, "size": 4096, "tensors": []}
        with pytest.raises(EngineError) as caught:
            server.post("update_weights", {"update_info": bucket})
        refused.append(str(caught.value))
    tree = [
        psutil.Process(server._process.pid),
        *psutil.Process(server._process.pid).children(recursive=True),
    ]
    held = [held for process in tree for held in process.net_connections("inet")]
    return {
        "statuses": statuses,
        "refused": refused,
        "victim": (victim.read_bytes(), (logs / "missing").exists()),
        "listens": {one.laddr.ip for one in held if one.status == psutil.CONN_LISTEN},
        "key told": [
            key in text
            for text in (server.log.read_text(), *(" ".join(each.cmdline()) for each in tree))
        ],
    }


def test_a_server_follows_the_trainer_or_refuses(tmp_path: Path) -> None:
    """Tied, with biases, with experts, and buckets so small that a layer's tensors come in several."""
    folder = save_tiny(tmp_path / "model", "qwen2-moe", hidden_size=128, tie_word_embeddings=True)
    shared = set(os.listdir("/dev/shm"))
    results = run_ranks(2, server_body, folder, tmp_path / "logs", timeout=240)
    for found in results:
        for name in ("first", "second", "repeated"):
            assert found[name][0] < 1e-5, name
        assert (found["intact"], found["stale"]) == (True, True)
        assert found["second"][1] == found["repeated"][1] != found["first"][1]
    told, elsewhere = results
    together, *alone = told["longer"]
    assert [completion.token_ids for completion in together] == [own.token_ids for (own,) in alone]
    assert told["names"] == ["VLLM::EngineCore"]  # and no worker that it would spin for
    outside = told["from outside"]
    assert outside["statuses"] == {False: {401}, True: {404}}  # with the run's key, or without
    assert all("A push names memory that it may not" in said for said in outside["refused"]), (
        outside["refused"]
    )
    assert outside["victim"] == (b"thesis", False)
    assert outside["listens"] == {"127.0.0.1"}
    assert not any(outside["key told"])
    assert told["probed"] == "healthy"  # though it holds half of the weights of a push
    assert "is not as it was written" in told["damaged"]
    assert "The push ended without model.norm.weight" in told["incomplete"]
    assert "bytes were written in push 3" in told["too few bytes"]
    assert "does not answer" in told["killed"]
    for name, version in (("damaged", 2), ("incomplete", 3), ("killed", 5)):
        assert (
            elsewhere[name]
            == f"Push {version} failed (see the first process); no engine has weights now."
        )
    made = set(os.listdir("/dev/shm")) - shared
    mapped = files_of_processes("maps")  # by other programs
    unmapped = {name for name in made if not any(name.encode() in maps for maps in mapped)}
    assert not unmapped & set(os.listdir("/dev/shm"))  # what others made meanwhile, they removed
    assert not [line for line in files_of_processes("cmdline") if str(folder).encode() in line]


def files_of_processes(name: str) -> list[bytes]:
    found = []
    for file in Path("/proc").glob(f"[0-9]*/{name}"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(file.read_bytes())
    return found
