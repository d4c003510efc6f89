"""Servers that speak as SGLang 0.5.23 does (tests/sglang_server.py): checked against that stand-in, and
never against SGLang.
"""

import runpy
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import ParallelConfig
from rftmega.core.types import Prompt, Sampling
from rftmega.rollout.servers import server_engine
from rftmega.rollout.servers.vllm import auth
from tests.distributed.test_servers_push import Trainer, push_body
from tests.distributed.test_streaming import assert_exact, in_flight_body
from tests.ranks import CONTEXT, LOCAL, run_ranks, start_in
from tests.tiny_models import save_tiny

KEY = "the key"


@contextmanager
def sglang(folder: Path, *arguments: str) -> Iterator[str]:
    """Yields the address of a server that takes KEY."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = [f"--model-path={folder}", f"--port={port}", f"--api-key={KEY}", *arguments]
    process = CONTEXT.Process(target=served, args=(given,), daemon=True)
    start_in([process], LOCAL)
    try:
        listens = False  # a run would begin with the servers that do
        while not listens and process.is_alive():
            time.sleep(0.1)
            with socket.socket() as probe:
                listens = probe.connect_ex(("127.0.0.1", port)) == 0
        assert listens, f"the server ended with {process.exitcode}"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join(60)


def served(arguments: list[str]) -> None:
    """Is the server's process, forked from one that has imported torch."""
    sys.argv[1:] = arguments
    runpy.run_module("tests.sglang_server", run_name="__main__")


@pytest.fixture(autouse=True)
def the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth.KEY, KEY)


@pytest.mark.parametrize(
    ("transport", "servers", "layout"),
    [
        ("network", 2, ParallelConfig(tensor=2)),
        ("checkpoint", 1, ParallelConfig(tensor=2)),
        pytest.param("network", 1, ParallelConfig(tensor=2, pipeline=2), marks=pytest.mark.ranks),
    ],
)
def test_servers_answer_under_each_push_as_the_trainer_scores(
    transport: str, servers: int, layout: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    with ExitStack() as running:
        addresses = [running.enter_context(sglang(folder)) for _ in range(servers)]
        given = {"engine": "sglang", "transport": transport, "addresses": addresses}
        size = layout.tensor * layout.pipeline
        for seen in run_ranks(size, push_body, folder, tmp_path, layout, given):
            for version, (metrics, (gap, versions)) in enumerate(seen["pushes"]):
                assert gap < 1e-5 and versions == {version}
                assert metrics["push_ratio"] == 1 and metrics["push_missed"] == 0
                assert metrics["servers_healthy"] == servers
            assert seen["intact"] == [True] * 3 and seen["changed since"]


SHORT, PACE = 60, "--pause=0.06"  # tokens of an answer, which takes almost four seconds


@pytest.mark.parametrize(
    ("on_update", "transport"),
    [
        pytest.param("wait", "network", marks=pytest.mark.ranks),
        pytest.param("abort", "checkpoint", marks=pytest.mark.ranks),
        pytest.param("recompute", "network", marks=pytest.mark.ranks),
        pytest.param("keep", "network", marks=pytest.mark.ranks),
    ],
)
def test_each_token_has_the_version_and_the_log_prob_that_it_was_drawn_under(
    on_update: str, transport: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    with sglang(folder, PACE) as address:
        given = {"engine": "sglang", "transport": transport, "addresses": [address]}
        body = partial(in_flight_body, length=SHORT, **given)
        found, _ = run_ranks(2, body, folder, tmp_path, on_update)
    seen = assert_exact(folder, found, kept=on_update == "keep", length=SHORT)
    assert 2 not in seen if on_update == "wait" else 2 in seen, "answers of two versions"


def patient_body(world: Any, folder: Path, logs: Path, rollout: Any) -> Any:
    """Weights that may take two seconds come while answers take longer."""
    server_engine.MESSAGE_SECONDS = 2.0
    return in_flight_body(world, folder, logs, "wait", length=SHORT, **rollout)


@pytest.mark.ranks
def test_weights_that_wait_for_long_answers_are_not_sent_before(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    with sglang(folder, PACE) as address:
        given = {"engine": "sglang", "transport": "network", "addresses": [address]}
        found, _ = run_ranks(2, patient_body, folder, tmp_path, given)
    assert_exact(folder, found, kept=False, length=SHORT)


def aloof_body(world: Any, folder: Path, logs: Path, rollout: Any) -> Any:
    server_engine.MESSAGE_SECONDS = 4.0
    trainer = Trainer(world, folder, logs, ParallelConfig(), **rollout)
    try:
        return [(trainer.weights.push(version=version), trainer.gap()) for version in range(2)]
    finally:
        trainer.engine.close()


@pytest.mark.ranks
def test_a_server_that_says_that_it_joined_and_did_not_misses_the_push(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    with sglang(folder) as first, sglang(folder, "--aloof") as second:
        given = {"engine": "sglang", "transport": "network", "addresses": [first, second]}
        (seen,) = run_ranks(1, aloof_body, folder, tmp_path, given)
    for version, (metrics, (gap, versions)) in enumerate(seen):
        assert gap < 1e-5 and versions == {version}
        assert metrics["servers_healthy"] == 1
        assert metrics["push_missed"] == metrics["servers_suspect"] == 1
        assert metrics["server_faults"] == version + 1


PARTS = [Sampling(0.7, top_p=0.8), Sampling(0.7, top_k=5), Sampling(0.7, top_k=5, min_p=0.7)]


def filtered_body(world: Any, folder: Path, logs: Path, rollout: Any) -> Any:
    trainer = Trainer(world, folder, logs, ParallelConfig(), **rollout)
    prompts = [Prompt((5, 9, number)) for number in range(10, 16)]
    found = []
    try:
        trainer.weights.push(version=0)
        for sampling in PARTS:
            completions = trainer.engine.generate(prompts, seeds=range(6), sampling=sampling)
            given = zip(prompts, completions, strict=True)
            found.append([(p.token_ids, list(a.token_ids), list(a.logprobs)) for p, a in given])
    finally:
        trainer.engine.close()
    return found


def test_log_probs_are_of_the_part_of_the_distribution_that_was_drawn_from(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_tiny(tmp_path / "model", "qwen3")
    with sglang(folder) as address:
        given = {"engine": "sglang", "transport": "network", "addresses": [address]}
        (found,) = run_ranks(1, filtered_body, folder, tmp_path, given)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sampling, completions in zip(PARTS, found, strict=True):
        for prompt, ids, logprobs in completions:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            rows = zip(logits / 0.7, ids, strict=True)
            expected = [log_prob_of(row, token, sampling) for row, token in rows]
            assert logprobs == pytest.approx(expected, abs=1e-5)


def log_prob_of(logits: torch.Tensor, token: int, sampling: Sampling) -> float:
    """The log-prob among the tokens that `types.Sampling` keeps, one by one from the likeliest."""
    chosen: list[int] = []
    share = logits.softmax(0)
    before = 0.0
    for number in logits.argsort(descending=True).tolist():
        own = float(share[number])
        if before >= sampling.top_p or own < sampling.min_p * float(share.max()):
            break
        if len(chosen) == (sampling.top_k or len(logits)):
            break
        chosen.append(number)
        before += own
    return float(logits[chosen].log_softmax(0)[chosen.index(token)])


def test_another_version_of_sglang_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rftmega.core.errors import EngineError
    from rftmega.rollout.servers.sglang_client import SGLangClient

    folder = save_tiny(tmp_path / "model", "qwen3")
    with sglang(folder, "--version=0.4.9") as address:
        client = SGLangClient(address, auth.headers(KEY))
        client.wait()
        with pytest.raises(
            EngineError, match=r"runs SGLang 0\.4\.9; requests are written for 0\.5\.23"
        ):
            client.refuse_other_version()
        with pytest.raises(EngineError, match="does not take the key"):
            SGLangClient(address, auth.headers("another")).there()
        with pytest.raises(EngineError, match="GenerateReqInput has no"):
            client.post("generate", {"input_ids": [1], "sampling_params": {}, "logprobs": True})
