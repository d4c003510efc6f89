"""`rftmega.train` from a script, whose reward functions no other process could import."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.conftest import ROOT, metrics_of
from tests.hub_server import hub

# Like a notebook, the script has no `if __name__ == "__main__"`.
SCRIPT = """
import json, os, sys
import rftmega

config, output = sys.argv[1:]
wanted = {{"4"}}


def ends_well(prompts, completions, answer, completion_ids, **columns):
    assert len(prompts) == len(completions) == len(answer) == len(completion_ids)
    assert isinstance(prompts[0], str) and set(columns) == {{"sum", "trajectories"}}
    {inside}
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
result = rftmega.train(
    config,
    processes=2,
    overrides=[
        "parallel.tensor=2", "trainer.steps=2", "data.eval=", "data.train=" + output + ".jsonl",
        "trainer.output=" + output, "reward.function_weights=[1,0.5]", "reward.format=0",
        "reward.format_pattern=", "trainer.trajectories=1", "rollout.max_prompt_tokens=20",
        *os.environ.get("UPLOADED", "").split(),
    ],
    rewards=[ends_well, shorter],
    environment=Twice,
)
print(json.dumps([result.metrics, str(result.output), result.stopped, result.exit_code]))
"""


def start(
    config: Path, folder: Path, inside: str = "pass", **environment: str
) -> "subprocess.Popen[str]":
    """The script in a process of its own, over records without a label."""
    records = [json.loads(line) for line in (config.parent / "train.jsonl").open()]
    lines = [
        json.dumps({"prompt": r["prompt"], "answer": r["label"], "sum": int(r["label"])})
        for r in records
    ]
    (folder / "out.jsonl").write_text("\n".join(lines))
    (folder / "script.py").write_text(SCRIPT.format(inside=inside))
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), str(config), str(folder / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"} | environment,
    )


def test_two_ranks_learn_by_a_closure_and_a_lambda_of_a_script(
    arithmetic: Path, tmp_path: Path
) -> None:
    received: dict[str, bytes] = {}
    with hub({}, received=received) as (address, _):
        process = start(
            arithmetic / "run.yaml",
            tmp_path,
            HF_ENDPOINT=address,
            UPLOADED="trainer.export=true trainer.push_to_hub=org/twice",
        )
        said, complained = process.communicate(timeout=240)
    assert process.returncode == 0, said + complained
    exported = tmp_path / "out/policy"
    assert (
        received["org/twice/model-00001-of-00001.safetensors"]
        == (exported / "model-00001-of-00001.safetensors").read_bytes()
    )
    assert b"trainer.steps: 2" in received["org/twice/README.md"]
    metrics, output, stopped, code = json.loads(said.splitlines()[-1])
    steps = metrics_of(tmp_path / "out")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert metrics == steps[-1]
    assert (output, stopped, code) == (str(tmp_path / "out"), False, 0)
    for step in steps[1:]:
        mixed = step["reward_ends_well"] + 0.5 * step["reward_lambda"]
        assert abs(step["reward"] - mixed) < 1e-5
        assert step["reward_lambda"] < 0
        assert "reward_exact_match" not in step
    with gzip.open(tmp_path / "out/trajectories/step_000001.jsonl.gz") as file:
        masks = [json.loads(line)["tokens"]["chosen"] for line in file]
    assert all(mask.count(False) == 1 for mask in masks), (
        "the environment of the script was not run"
    )


def test_what_a_reward_function_raises_in_a_rank_is_raised_where_the_run_was_started(
    arithmetic: Path, tmp_path: Path
) -> None:
    process = start(arithmetic / "run.yaml", tmp_path, inside="{}['nothing']")
    said, complained = process.communicate(timeout=240)
    assert process.returncode == 1, said + complained
    assert "RewardError: reward.functions: ends_well raised KeyError: 'nothing'" in complained
    assert f"{tmp_path / 'script.py'}:" in complained


def test_a_rank_that_dies_is_told_and_ends_the_run(arithmetic: Path, tmp_path: Path) -> None:
    dies = "os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)"
    process = start(arithmetic / "run.yaml", tmp_path, inside=dies)
    said, complained = process.communicate(timeout=240)
    assert process.returncode == 1, said + complained
    assert "was killed by SIGKILL; the other ranks were ended" in complained
    assert "RanksFailed: The run ended with exit code 1" in complained


def test_ctrl_c_ends_all_ranks_and_is_a_keyboard_interrupt(
    arithmetic: Path, tmp_path: Path
) -> None:
    note = tmp_path / "rank"
    waits = f"open({str(note)!r}, 'w').write(str(os.getpid())); __import__('time').sleep(600)"
    process = start(arithmetic / "run.yaml", tmp_path, inside=waits)
    end = time.monotonic() + 200
    while not (note.is_file() and note.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    rank = int(note.read_text())
    process.send_signal(signal.SIGINT)
    said, complained = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in complained, said + complained
    assert process.returncode == -signal.SIGINT
    assert "stopped by SIGINT; all ranks were ended." in complained
    assert not Path(f"/proc/{rank}").exists()
