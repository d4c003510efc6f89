"""`rftmega.train` from a script, whose reward functions no other process could import."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.conftest import ROOT, metrics_of
from tests.hub_server import hub

# Like a notebook, the script has no `if __name__ == "__main__"`. It trains once for each name.
SCRIPT = """
import json, os, sys, time, traceback
import rftmega
from rftmega.core.errors import RewardError

config, folder, *names = sys.argv[1:]
wanted = {"4"}


def ends_well(prompts, completions, answer, completion_ids, **columns):
    assert len(prompts) == len(completions) == len(answer) == len(completion_ids)
    assert isinstance(prompts[0], str) and set(columns) == {"sum", "trajectories"}
    if name == "raises":
        {}["nothing"]
    if name == "dies" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    if name == "waits":
        open(folder + "/rank", "w").write(str(os.getpid()))
        time.sleep(600)
    return [float(text.endswith(tuple(wanted))) for text in completions]


class Twice:
    def __init__(self, tokenizer):
        self.reply = tuple(tokenizer.encode_reply("7"))

    async def run(self, task, model):
        from rftmega.core.types import Trajectory

        first = await model.generate(task.token_ids)
        if not wanted:
            return [Trajectory.of(task.token_ids, first)]
        second = await model.generate((*task.token_ids, *first.token_ids, *self.reply))
        return [Trajectory.of(task.token_ids, first, self.reply, second)]


shorter = lambda completions: [-len(text) for text in completions]
uploaded = ["trainer.export=true", "trainer.push_to_hub=org/twice"]
for name in names:
    try:
        result = rftmega.train(
            config,
            processes=2,
            overrides=[
                "parallel.tensor=2", "trainer.steps=2", "data.eval=", f"data.train={folder}/train.jsonl",
                f"trainer.output={folder}/{name}", "reward.function_weights=[1,0.5]", "reward.format=0",
                "reward.format_pattern=", "trainer.trajectories=1", "rollout.max_prompt_tokens=20",
                *(uploaded if name == "learns" else []),
            ],
            rewards=[ends_well, shorter],
            environment=Twice,
        )
        print(json.dumps([result.metrics, str(result.output), result.stopped, result.exit_code]))
    except RewardError:
        traceback.print_exc()
"""


class Ended(NamedTuple):
    """What the script said and left."""

    code: int
    said: str
    complained: str
    folder: Path
    received: dict[str, bytes]  # by the hub


def run_script(
    config: Path,
    folder: Path,
    *names: str,
    then: Callable[["subprocess.Popen[str]"], None] = lambda process: None,
) -> Ended:
    """The script in a process of its own, over records without a label; `then` what is done to it."""
    records = [json.loads(line) for line in (config.parent / "train.jsonl").open()]
    lines = [
        json.dumps({"prompt": r["prompt"], "answer": r["label"], "sum": int(r["label"])})
        for r in records
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "script.py").write_text(SCRIPT)
    received: dict[str, bytes] = {}
    with hub({}, received=received) as (address, _):
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": address}
        process = subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(config), str(folder), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        then(process)
        said, complained = process.communicate(timeout=240)
    return Ended(process.returncode, said, complained, folder, received)


@pytest.fixture(scope="module")
def ended(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three runs of one script: a reward function raises, all is well, and Ctrl-C comes."""
    folder = tmp_path_factory.mktemp("script")

    def interrupt(process: "subprocess.Popen[str]") -> None:
        note, end = folder / "rank", time.monotonic() + 200
        while not (note.is_file() and note.read_text()) and time.monotonic() < end:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)

    return run_script(arithmetic / "run.yaml", folder, "raises", "learns", "waits", then=interrupt)


def test_two_ranks_learn_by_a_closure_and_a_lambda_of_a_script(ended: Ended) -> None:
    output, received = ended.folder / "learns", ended.received
    assert (
        received["org/twice/model-00001-of-00001.safetensors"]
        == (output / "policy/model-00001-of-00001.safetensors").read_bytes()
    )
    assert b"trainer.steps: 2" in received["org/twice/README.md"]
    (line,) = (line for line in ended.said.splitlines() if line.startswith("[{"))
    metrics, where, stopped, code = json.loads(line)
    steps = metrics_of(output)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert metrics == steps[-1]
    assert (where, stopped, code) == (str(output), False, 0)
    for step in steps[1:]:
        mixed = step["reward_ends_well"] + 0.5 * step["reward_lambda"]
        assert abs(step["reward"] - mixed) < 1e-5
        assert step["reward_lambda"] < 0
        assert "reward_exact_match" not in step
    with gzip.open(output / "trajectories/step_000001.jsonl.gz") as file:
        masks = [json.loads(line)["tokens"]["chosen"] for line in file]
    assert all(mask.count(False) == 1 for mask in masks), (
        "the environment of the script was not run"
    )


def test_what_a_reward_function_raises_in_a_rank_is_raised_where_the_run_was_started(
    ended: Ended,
) -> None:
    wanted = "RewardError: reward.functions: ends_well raised KeyError: 'nothing'"
    assert wanted in ended.complained
    assert f"{ended.folder / 'script.py'}:" in ended.complained


def test_ctrl_c_ends_all_ranks_and_is_a_keyboard_interrupt(ended: Ended) -> None:
    assert "KeyboardInterrupt" in ended.complained, ended
    assert ended.code == -signal.SIGINT
    assert "stopped by SIGINT; all ranks were ended." in ended.complained
    assert "shutting down workers" not in ended.complained, "torch's agent says it, too"
    assert "resource_tracker" not in ended.complained
    assert not Path(f"/proc/{(ended.folder / 'rank').read_text()}").exists()


@pytest.mark.ranks
def test_a_rank_that_dies_is_told_and_ends_the_run(arithmetic: Path, tmp_path: Path) -> None:
    found = run_script(arithmetic / "run.yaml", tmp_path, "dies")
    assert found.code == 1, found
    assert "was killed by SIGKILL; the other ranks were ended" in found.complained
    assert "RanksFailed: The run ended with exit code 1" in found.complained
