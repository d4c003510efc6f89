"""Elastic runs: nodes fail, stand still, leave and come, and the run ends as one that nothing
disturbed.
"""

import gzip
import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import numbers_of, train_rl
from tests.elastic_nodes import Node, rounds_of, steps_of, until

STEPS = 8
OPTIONS = ["checkpoint.every=1", "trainer.export=true", f"trainer.steps={STEPS}", "data.eval="]
# long enough for a node to come before the end, however slowly it starts
LONG = ["trainer.steps=120", "trainer.prompts_per_step=4", "trainer.trajectories=1"]
PARTIAL = [
    "trainer.max_staleness=2",
    "algorithm.importance_sampling=token",
    "rollout.max_response_tokens=40",
    "rollout.max_batch=8",
    "trainer.prompts_per_step=4",
]
LORA = ["model.lora.rank=4", "model.lora.push=merged"]
KINDS = {
    "partial rollouts": PARTIAL,
    "LoRA": LORA,
    "FSDP2": ["backend=fsdp"],
    "vLLM": ["rollout.engine=vllm", "rollout.cpu_cache_gib=0.05", "rollout.max_batch=16"],
}


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    found: list[Node] = []
    yield found
    for node in found:
        if node.process.poll() is None:
            node.signal(signal.SIGCONT)
            node.kill()


def assert_nothing_left(output: Path) -> None:
    assert not list((output / "elastic/members").iterdir())
    marked = [p for p in psutil.process_iter(["cmdline"]) if str(output) in str(p.info["cmdline"])]
    assert not marked


def assert_equal_weights(one: Path, other: Path) -> None:
    weights, others = (
        load_file(each / "policy/model-00001-of-00001.safetensors") for each in (one, other)
    )
    assert weights.keys() == others.keys()
    assert all(tensor.equal(others[name]) for name, tensor in weights.items())


def prompts_of(output: Path) -> list[int]:
    """Returns the indices of the records that each step trained on, in the order of steps."""
    found: list[int] = []
    for path in sorted((output / "trajectories").glob("step_*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            found += dict.fromkeys(json.loads(line)["index"] for line in lines)
    return found


def test_a_run_whose_first_node_was_killed_and_came_back_ends_as_one_that_nothing_disturbed(
    arithmetic: Path, tmp_path: Path, nodes: list[Node]
) -> None:
    """The killed node has the first rank and the store where ranks meet; the layout is the same."""
    whole, output = tmp_path / "whole", tmp_path / "elastic"
    config = arithmetic / "run.yaml"
    done = train_rl(config, f"trainer.output={whole}", *OPTIONS, "--processes", 2)
    assert done.returncode == 0, done.stderr
    # an option that must not change what healthy nodes do
    options = [f"trainer.output={output}", *OPTIONS, "faults.check_replicas_every=1"]
    nodes += [Node(name, config, options, nodes="2:2") for name in ("a", "b")]
    until(lambda: steps_of(output) >= 3, nodes)
    nodes[0].kill()
    nodes.append(Node("a", config, options, nodes="2:2"))
    assert [node.end() for node in nodes[1:]] == [0, 0], nodes[1].said
    first, second = rounds_of(output)
    assert first["reason"] == "the run begins"
    assert second["reason"] in ("a was started again", "a gave no sign of life for 4 s")
    assert numbers_of(output) == numbers_of(whole)
    assert_equal_weights(whole, output)
    assert_nothing_left(output)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_the_nodes_that_are_left_and_with_those_that_come(
    kind: str, arithmetic: Path, tmp_path: Path, nodes: list[Node]
) -> None:
    """One of two nodes is killed, the other goes on alone, and a new one is added: each prompt is
    trained on once, and the numbers are those of an undisturbed run but for another order of sums.
    Which rollouts go on in later steps depends on the number of engines.
    """
    whole, output = tmp_path / "whole", tmp_path / "elastic"
    config = arithmetic / "run.yaml"
    steps = [*OPTIONS, *LONG, *KINDS[kind]]
    done = train_rl(config, f"trainer.output={whole}", *steps, "--processes", 2)
    assert done.returncode == 0, done.stderr
    options = [f"trainer.output={output}", *steps]
    nodes += [Node(name, config, options, nodes="1:2") for name in ("a", "b")]
    until(lambda: steps_of(output) >= 3, nodes)
    nodes[0].kill()
    until(lambda: len(rounds_of(output)) >= 2, nodes[1:])
    nodes.append(Node("c", config, options, nodes="1:2"))
    assert [node.end() for node in nodes[1:]] == [0, 0], nodes[1].said
    members = [[name for name, _ in found["members"]] for found in rounds_of(output)]  # type: ignore[attr-defined]
    assert members == [["a", "b"], ["b"], ["b", "c"]]
    found, wanted = numbers_of(output), numbers_of(whole)
    assert [line["step"] for line in found] == list(range(121))
    assert prompts_of(output) == prompts_of(whole) or kind == "partial rollouts"
    assert max(Counter(prompts_of(output)).values()) == 1, "a prompt was trained on twice"
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        if kind == "partial rollouts":
            break
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert_nothing_left(output)
