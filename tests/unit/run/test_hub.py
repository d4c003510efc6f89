"""Models and data of the hub, over a stand-in of its HTTP API."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftmega.examples.arithmetic import warm_start
from tests.hub_server import hub
from tests.tiny_models import save_tiny

# vLLM's engine sets the first in the processes that import it
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
PROGRAM = """
import json, sys
from rftmega.config import RunConfig, DataConfig, ModelConfig
from rftmega.core.errors import ConfigError
from rftmega.run.hub import fetched
for asked in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    model, train, weights = asked
    data = DataConfig(train=train, evals={"a": train})
    try:
        found = fetched(RunConfig(model=ModelConfig(path=model), data=data), weights=weights == "weights")
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        continue
    print(json.dumps([found.model.path, found.data.train, found.data.evals["a"], found.critic.path]))
"""


def asked(
    where: Path, address: str, *given: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own: the library reads its environment once."""
    own = {"HF_ENDPOINT": address, "HF_HOME": str(where / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *given],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | own | environment,
        cwd=where,
        timeout=120,
        check=False,
    )


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, Path]:
    model, data = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "data"
    (data / "data").mkdir(parents=True)
    (model / "pytorch_model.bin").write_bytes(b"old")
    for split, number in (("train", 0), ("train", 1), ("test", 0)):
        file = data / f"data/{split}-{number:05}-of-00002.jsonl"
        file.write_text(json.dumps({"prompt": f"{len(split)}+{number}=", "label": "1"}) + "\n")
    return {"models/org/tiny": model, "datasets/org/sums": data}


def test_a_model_and_data_are_fetched_once_and_read_from_the_cache(
    repositories: dict[str, Path], tmp_path: Path
) -> None:
    from rftmega.data.records import records

    with hub(repositories) as (address, requests):
        done = asked(tmp_path, address, "org/tiny", "org/sums#train", "weights")
        assert done.returncode == 0, done.stderr
        model, train, held_out, critic = json.loads(done.stdout)
        assert not [request for request in requests if "pytorch_model.bin" in request]
    source = repositories["models/org/tiny"]
    assert (Path(model) / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert train == held_out
    assert critic == ""
    assert [record["prompt"] for _, record in records(train)] == ["5+0=", "5+1="]
    # the hub is gone; what was fetched is there
    again = asked(tmp_path, address, "org/tiny", "org/sums#train", "weights", HF_HUB_OFFLINE="1")
    assert json.loads(again.stdout)[0] == model


def test_without_weights_a_model_is_what_describes_it(
    repositories: dict[str, Path], tmp_path: Path
) -> None:
    with hub(repositories) as (address, _):
        done = asked(tmp_path, address, "org/tiny@main", "", "text")
    folder = Path(json.loads(done.stdout)[0])
    assert (folder / "config.json").is_file()
    assert not list(folder.glob("*.safetensors"))


def test_a_token_of_the_environment_opens_what_is_private(
    repositories: dict[str, Path], tmp_path: Path
) -> None:
    with hub(repositories, token="secret") as (address, _):
        refused = asked(tmp_path, address, "org/tiny", "", "text")
        assert "no model of the hub that this account sees (HF_TOKEN)" in refused.stderr
        done = asked(tmp_path, address, "org/tiny", "", "text", HF_TOKEN="secret")
        assert done.returncode == 0, done.stderr


def test_what_can_not_be_had_is_said(repositories: dict[str, Path], tmp_path: Path) -> None:
    with hub(repositories) as (address, _):
        two = ("org/tony", "", "text", "org/tiny@v9", "", "text")
        missing, revision = asked(tmp_path, address, *two).stderr.split("refused: ")[1:]
    assert "model.path=org/tony is no folder here, and no model of the hub" in missing
    assert "the hub's org/tiny has no revision v9" in revision
    gone = asked(tmp_path, address, "org/tiny", "", "text").stderr
    assert "not in the hub's cache, and the hub can't be reached" in gone
    assert "hf download org/tiny --repo-type model" in gone


def test_a_path_is_never_looked_up(repositories: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with hub(repositories) as (address, requests):
        missing = ("runs/none", "nowhere/none.jsonl")
        given = [part for path in missing for part in (str(tmp_path / "model"), path, "weights")]
        done = asked(tmp_path, address, *given)
        assert [json.loads(line)[1] for line in done.stdout.splitlines()] == list(missing)
        assert requests == []


@pytest.mark.ranks
def test_the_program_takes_names_of_the_hub(repositories: dict[str, Path], tmp_path: Path) -> None:
    warm_start.tokenizer().save_pretrained(repositories["models/org/tiny"])
    limits = "max_prompt_tokens: 8, max_response_tokens: 8"
    options = (
        "model: {path: org/tiny}",
        "data: {train: 'org/sums#train'}",
        f"rollout: {{engine: scripted, {limits}}}",
    )
    (tmp_path / "run.yaml").write_text("\n".join(options))
    with hub(repositories) as (address, _):
        done = subprocess.run(
            [sys.executable, "-m", "rftmega", "train", "run.yaml", "--dry-run", "--processes", "2"],
            capture_output=True,
            text=True,
            env=ENVIRONMENT | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache")},
            cwd=tmp_path,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "processes   2 = " in done.stdout


UPLOADING = """
import json, logging, sys
from rftmega.config import ModelConfig, RunConfig, TrainerConfig
from rftmega.monitoring.model_card import write_model_card
from rftmega.core.errors import ConfigError
from rftmega.run.hub_upload import claim, upload
from pathlib import Path
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
cached = "cache/models--Qwen--Qwen3-0.6B/snapshots/0123abc"
config = RunConfig(
    model=ModelConfig(path=cached), trainer=TrainerConfig(output="run", push_to_hub="org/mine", steps=7)
)
try:
    claim(config)
except ConfigError as error:
    sys.exit(f"refused: {error}")
if "claim" not in sys.argv:
    write_model_card(config, Path("run/metrics.jsonl"))
    upload(config)
"""


def uploading(
    where: Path, address: str, *given: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": address, "HF_HOME": str(where / "cache"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", UPLOADING, *given],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | own | environment,
        cwd=where,
        timeout=120,
        check=False,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output of a run of seven steps."""
    save_tiny(tmp_path / "run/policy", "qwen3")
    (tmp_path / "run/policy/.rftmega-export").touch()
    steps: list[dict[str, float | None]] = [
        {"step": 0, "time": 1.0, "eval_exact_match": 0.25, "eval_seconds": 3.0},
        {"step": 1, "time": 2.0, "reward": 0.125, "push_bytes": 5.0},
        {"step": 7, "time": 3.0, "reward": None, "eval_exact_match": 0.75},
    ]
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (tmp_path / "run/metrics.jsonl").write_text(lines)
    return tmp_path / "run"


def test_a_trained_model_is_uploaded_with_a_card_of_its_figures_and_options(
    run: Path, tmp_path: Path
) -> None:
    received: dict[str, bytes] = {}
    with hub({}, token="mine", received=received) as (address, requests):
        done = uploading(tmp_path, address, HF_TOKEN="mine")
    assert done.returncode == 0, done.stderr
    posted = [request for request in requests if request.startswith("POST")]
    assert posted[0] == "POST /api/repos/create"
    assert f"The model is at {address}/org/mine" in done.stdout
    weights = (run / "policy/model.safetensors").read_bytes()
    assert received["org/mine/model.safetensors"] == weights
    assert "org/mine/.rftmega-export" not in received
    card = received["org/mine/README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "base_model: Qwen/Qwen3-0.6B\n" in card
    assert "`Qwen/Qwen3-0.6B` (revision 0123abc) by reinforcement learning, 7 steps" in card
    assert "| eval_exact_match | 0.25 (step 0) | 0.75 (step 7) |\n" in card
    assert "| reward | 0.125 (step 1) | 0.125 (step 1) |" in card
    assert "push_bytes" not in card
    assert "eval_seconds" not in card
    assert "trainer.steps: 7\n" in card
    assert "trainer.seed" not in card


def test_a_repository_that_can_not_be_made_stops_the_run_before_it_begins(
    run: Path, tmp_path: Path
) -> None:
    with hub({}, token="mine") as (address, _):
        refused = uploading(tmp_path, address, "claim", HF_TOKEN="other").stderr
        offline = uploading(tmp_path, address, "claim", HF_HUB_OFFLINE="1").stderr
    assert "trainer.push_to_hub=org/mine: the hub lets this account (HF_TOKEN) make no" in refused
    assert "trainer.push_to_hub=org/mine needs a network, and HF_HUB_OFFLINE is set" in offline


@pytest.mark.ranks
def test_a_hub_that_refuses_or_is_gone_is_told_with_how_to_upload_by_hand(
    run: Path, tmp_path: Path
) -> None:
    with hub({}, readers=True) as (address, _):
        reader = uploading(tmp_path, address, "claim").stderr
    assert "trainer.push_to_hub=org/mine: the hub lets this account (HF_TOKEN) make no" in reader
    gone = uploading(tmp_path, address, "claim").stderr
    assert "the hub can't be reached" in gone
    assert "hf upload org/mine run/policy --exclude .rftmega-export" in gone


def test_an_upload_that_fails_says_how_to_do_it_again(run: Path, tmp_path: Path) -> None:
    broken = UPLOADING.replace(
        "    upload(config)", "    Path('run/policy').rename('elsewhere'); upload(config)"
    )
    with hub({}) as (address, _):
        done = subprocess.run(
            [sys.executable, "-c", broken], capture_output=True, text=True, cwd=tmp_path, timeout=120,
            env=ENVIRONMENT | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache")}, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The model is not uploaded: " in done.stdout
    assert "hf upload org/mine run/policy" in done.stdout
