"""Fleets of stand-ins for servers, and of servers that are started elsewhere; what their answers differ
by from the trainer.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.rollout.servers.server_group import ServerGroupMember
from rftmega.rollout.servers.vllm import auth
from tests.layouts import rows_of

KEY = "of this test"  # of servers that are started elsewhere


def set_servers(engine: ServerEngine, *servers: Any) -> None:
    """Makes these the engine's servers, which have the newest weights."""
    engine.server_group.members = [
        ServerGroupMember(number, server) for number, server in enumerate(servers)
    ]
    for member in engine.server_group.members:
        member.health.came()
        member.health.landed()


@contextmanager
def two_servers_elsewhere(run: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Gives the server list of two servers of `rftmega serve`, which ends them."""
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "rftmega", "serve", str(folder / "run.yaml")]
    command += ["--listen", "127.0.0.1", "--server-list", str(folder / "both")]
    command += ["--logs", str(folder / "logs"), "--servers", "2"]
    with (folder / "serve.log").open("w") as said:
        serving = subprocess.Popen(
            command, env=os.environ | {auth.KEY: KEY}, stdout=said, stderr=said
        )
    try:
        yield folder / "both"
    finally:
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0


def gap_of_completions(
    engine: ServerEngine, actor: Any, prompts: Sequence[Prompt], temperature: float
) -> tuple[float, list[Completion]]:
    """Returns the largest difference of log-probs between answers and trainer, and the answers."""
    completions = engine.generate(
        prompts, seeds=range(1, len(prompts) + 1), sampling=Sampling(temperature)
    )
    told: list[Any] = [completions]
    dist.broadcast_object_list(told)
    (completions,) = told
    rows = rows_of(
        [[*p.token_ids, *a.token_ids] for p, a in zip(prompts, completions, strict=True)],
        [len(p.token_ids) for p in prompts],
    )
    logp = actor.log_probs(rows).logp[rows.mask]
    said = torch.tensor([x for completion in completions for x in completion.logprobs])
    return float((logp - said).abs().max()), completions
