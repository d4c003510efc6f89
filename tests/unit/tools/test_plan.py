"""tools/plan.py for models that no machine here could hold."""

import json
from pathlib import Path

import pytest

from rftmega.tools import plan

ROOT = Path(__file__).parents[3]
PLANS = {"llama-3-70b": 64, "qwen3-235b-a22b": 256, "deepseek-v3": 512}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the examples' model.path is relative to it


def given(name: str, *more: str) -> list[str]:
    return [
        f"examples/planning/{name}/run.yaml",
        "--gpus",
        str(PLANS[name]),
        "--gpu-memory",
        "80",
        *more,
    ]


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-70b",
        pytest.param("qwen3-235b-a22b", marks=pytest.mark.ranks),
        pytest.param("deepseek-v3", marks=pytest.mark.ranks),
    ],
)
def test_large_models_are_planned_and_fit_where_their_example_says_so(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(given(name)) == 0
    said = capsys.readouterr().out
    assert "All of it fits." in said
    assert max(map(len, said.splitlines())) <= plan.WIDTH
    for phase in ("rollout", "score", "update", "push"):
        assert f"\n{phase} " in said


@pytest.mark.ranks
def test_half_a_billion_tokens_a_step_fit_beside_the_offload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """4096 rollouts of 128k tokens on 1024 ranks: hosts of 1 TB hold them beside weights, gradients'
    masters and moments that have left the devices.
    """
    more = (
        "--host-memory", "1000", "--json", "parallel.context=16", "trainer.prompts_per_step=256",
        "rollout.samples_per_prompt=16", "rollout.max_prompt_tokens=2048",
        "rollout.max_response_tokens=129024", "trainer.max_tokens_per_micro_batch=131072",
    )  # fmt: skip
    asked = given("llama-3-70b", *more)
    asked[asked.index("64")] = "1024"
    assert plan.main(asked) == 0, "it does not fit"
    found = json.loads(capsys.readouterr().out)
    tokens = 4096 * 131072
    assert found["offload"]
    assert all(host["offload"] > 0 for host in found["host"])
    # id, mask, log-prob, version; three log-probs and entropies, advantage
    assert found["each_host"]["rollout"] == tokens * (13 + 3 * 4 + 4)
    data, whole = found["seconds_at_least"].pop("data"), found["seconds_at_least"]
    assert data["one core"] == pytest.approx(tokens * 250e-9)
    # two passes of two numbers, and the answers, over 128 hosts in a ring
    assert data["NIC"] == pytest.approx(2 * 127 / 128 * tokens * (13 + 16) / 50e9)
    assert sum(data.values()) < 0.02 * sum(sum(parts.values()) for parts in whole.values())


def test_what_does_not_fit_is_said_with_the_nearest_layout_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = ["parallel.pipeline=1"]
    assert plan.main(given("llama-3-70b", *wrong)) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= plan.WIDTH
    assert "update on stage 0 needs 100.3 GB of 80" in said
    assert plan.main(given("llama-3-70b", *wrong, "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    changes = found["proposal"]["changes"]
    assert changes.keys() == {"parallel.pipeline"}
    assert {"parallel.tensor": 4} in [rejected["changes"] for rejected in found["rejected"]]
    assert (
        plan.main(given("llama-3-70b", *(f"{name}={value}" for name, value in changes.items())))
        == 0
    )


def test_a_run_on_fsdp_is_planned_and_a_backend_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sharded = ("backend=fsdp", "parallel.tensor=1", "parallel.pipeline=1")
    sharded += ("parallel.sequence=false",)
    assert plan.main(given("llama-3-70b", *sharded)) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= plan.WIDTH
    assert "1 replica(s) of FSDP over 64, ZeRO-3, 64 devices" in said
    assert "\n  parallel.recompute=full    (a step" in said
    assert "\nRecommended: backend=megatron: a step under fsdp takes" in said
    assert plan.main(given("llama-3-70b", *sharded, "parallel.recompute=full", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "fsdp"
    assert found["stages"][0]["update"]["gathered"] > found["stages"][0]["score"]["gathered"] > 0
    changes = found["recommended"]["best"]["fsdp"]["changes"]
    assert "parallel.recompute" not in changes, "what is given already is no change"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["parallel.tensor=3"], "number of attention heads"),
        (["--gpu-memory", "2"], "more than --reserved-gb"),
        (["--nic-gbs", "0"], "must be positive"),
        (["backend=fsdp"], "parallel.pipeline=4 needs backend=megatron"),
        (["parallel.tensr=2"], "Did you mean parallel.tensor?"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(given("llama-3-70b", *more)) == 2
    assert complaint in capsys.readouterr().err


def test_teachers_are_planned_with_their_own_backends(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "path: examples/planning/llama-3-70b"
    teachers = [
        f"{{name: expert, {folder}, backend: fsdp, parallel: {{replicas: 2}}}}",
        f"{{name: other, {folder}, vocabulary: sampled, parallel: {{tensor: 4, pipeline: 2}}}}",
    ]
    asked = given("llama-3-70b", f"algorithm.teachers=[{', '.join(teachers)}]", "--no-search")
    assert plan.main(asked) == 0
    said = capsys.readouterr().out
    assert "\nexpert   backend fsdp, 2 replica(s) of FSDP over 32, ZeRO-3\n" in said
    assert "\nother    backend megatron, TP4 x PP2 x DP8\n" in said
    assert "\nscore_expert " in said
    assert "\nscore_other " in said
    assert ", teachers " in said
