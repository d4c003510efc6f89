"""A reward that never returns ends a run with its limit named, and does not keep a request to stop
from saving.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Run


class Silent(BaseHTTPRequestHandler):
    """It answers the first few requests, of one answer each, and no other."""

    asked = threading.Event()
    completions = threading.Semaphore(0)

    def do_POST(self) -> None:
        if not Silent.completions.acquire(blocking=False):
            Silent.asked.set()
            threading.Event().wait(600)
        body = b'{"rewards": [1.0]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def silent() -> Iterator[str]:
    Silent.asked.clear()
    Silent.completions.release(6)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def options(url: str, output: Path) -> list[str]:
    return [
        "reward.remote=1",
        f"reward.remote_url={url}",
        "reward.remote_timeout=1000",
        "reward.remote_batch=1",
        f"trainer.output={output}",
        "data.eval=",
    ]


@pytest.mark.ranks
def test_a_reward_that_never_returns_is_named_with_its_limit(
    arithmetic: Path, tmp_path: Path, silent: str, train: Run
) -> None:
    done = train(
        arithmetic / "run.yaml",
        *options(silent, tmp_path),
        "reward.timeout=2",
        "--processes",
        "2",
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "The reward gave no scores within reward.timeout=2 s for" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
def test_a_request_to_stop_is_not_held_up_by_it(
    arithmetic: Path, tmp_path: Path, silent: str
) -> None:
    command = [
        sys.executable,
        str(ROOT / "train_rl.py"),
        str(arithmetic / "run.yaml"),
        *options(silent, tmp_path),
    ]
    process = subprocess.Popen(
        # one answer is finished at a time, so that those of the first few requests have their scores
        [*command, "rollout.max_batch=1", "checkpoint.every=1", "--processes", "2"],
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert Silent.asked.wait(120)
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (tmp_path / "checkpoints/latest").read_text().strip(), "what there was is saved"
