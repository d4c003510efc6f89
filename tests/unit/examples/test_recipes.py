"""examples/gsm8k, dapo_math, code_agent and moe_30b: their data, their options for the real sizes, their files for
Slurm, their plans, and every line of them on a tiny model.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.code_agent import make_data as code_agent
from examples.dapo_math import make_data as dapo_math
from examples.gsm8k import make_data as gsm8k
from rftmega.config import load
from rftmega.core.errors import DataError
from rftmega.rewards.code_labels import read_tests
from rftmega.tools import launch, plan
from tests.tiny_models import save_tiny
from tests.warm_command import run_warm

ROOT = Path(__file__).parents[3]


class Recipe(NamedTuple):
    """A file of an example, the model it names, and the machine it is for."""

    file: str
    model: str
    nodes: int
    gpus: int
    tiny: str  # variant of tests/tiny_models.py
    shrunk: tuple[str, ...]  # the layout on two processes


RECIPES = (
    Recipe("gsm8k/one_gpu", "qwen2.5-0.5b", 1, 1, "qwen2-tied", ()),
    Recipe("gsm8k/eight_gpus", "qwen2.5-0.5b", 1, 8, "qwen2-tied", ()),
    Recipe("code_agent/eight_gpus", "qwen3-8b", 1, 8, "qwen3", ()),
    Recipe("dapo_math/one_node", "qwen3-8b", 1, 8, "qwen3", ()),
    Recipe("dapo_math/eight_nodes", "qwen3-8b", 8, 8, "qwen3", ()),
    Recipe(
        *("moe_30b/four_nodes", "qwen3-30b-a3b", 4, 8, "qwen3-moe"),
        ("parallel.tensor=2", "parallel.expert=2", "rollout.tensor=1"),
    ),
)
RUN = (
    RECIPES[1],
    RECIPES[2],
    RECIPES[4],
    RECIPES[5],
)  # those of which the others are the base, or alone
SMALL = (
    *("rollout.engine=scripted", "rollout.samples_per_prompt=4", "rollout.max_prompt_tokens=400"),
    *("rollout.max_response_tokens=12", "trainer.steps=1", "trainer.prompts_per_step=4"),
    *("trainer.max_tokens_per_micro_batch=2048", "trainer.eval_every=1", "checkpoint.every=1"),
    *("optimizer.warmup_steps=0", "rollout.memory_fraction=0.5"),  # the latter is vLLM's only
)
QUESTIONS = [
    {"question": f"Ann has {n} books and buys {n}. How many?", "answer": f"{n}+{n}\n#### {2 * n:,}"}
    for n in (2, 7, 30, 700, 1500, 8)
]
named = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            recipe,
            id=recipe.file,
            marks=[pytest.mark.ranks] if recipe in (RECIPES[0], RECIPES[4]) else [],
        )
        for recipe in RECIPES
    ],
)


def problem(n: int) -> dict[str, Any]:
    text = f"Solve it.\n\nWhat is {n} + {n}?\n\nAnswer on a line of its own after Answer:"
    message = {"content": text, "role": "user"}
    label = {"ground_truth": str(2 * n), "style": "rule"}
    return {"data_source": "math_dapo", "prompt": [message], "reward_model": label}


def program(n: int) -> dict[str, Any]:
    asserts = [f"assert add(1, {n}) == {n + 1}", "assert add(2, 2) == 4"]
    fields = {"text": f"Write a function add that adds, task {n}.", "test_list": asserts}
    return fields | {"test_setup_code": "import math" * (n == 2), "challenge_test_list": []}


def made(folder: Path) -> Path:
    """The data of all examples, of a few lines in the files' own format."""
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    repeated = [problem(n) for n in (1, 2, 3, 1, 4, 5, 2)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(repeated), folder / "p.parquet")
    both = ["--train", str(folder / "q.jsonl"), "--eval", str(folder / "q.jsonl")]
    assert gsm8k.main([str(folder / "runs/gsm8k/data"), *both]) == 0
    both = ["--train", str(folder / "p.parquet"), "--aime24", str(folder / "p.parquet")]
    assert dapo_math.main([str(folder / "runs/dapo_math/data"), *both]) == 0
    programs = [program(n) for n in range(1, 9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(programs), folder / "m.parquet")
    both = ["--train", str(folder / "m.parquet"), "--eval", str(folder / "m.parquet")]
    assert code_agent.main([str(folder / "runs/code_agent/data"), *both]) == 0
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_data_has_the_number_of_each_solution_and_each_problem_once(tmp_path: Path) -> None:
    made(tmp_path)
    questions = lines(tmp_path / "runs/gsm8k/data/train.jsonl")
    assert [line["label"] for line in questions] == ["4", "14", "60", "1400", "3000", "16"]
    assert questions[0]["prompt"] == QUESTIONS[0]["question"]
    problems = lines(tmp_path / "runs/dapo_math/data/aime24.jsonl")
    assert [line["label"] for line in problems] == ["2", "4", "6", "8", "10"]
    assert problems[0]["prompt"][0].keys() == {"role", "content"}
    programs = lines(tmp_path / "runs/code_agent/data/train.jsonl")
    tests = [read_tests(line["label"])["tests"] for line in programs[:2]]
    assert tests[0] == "assert add(1, 1) == 2\nassert add(2, 2) == 4"
    assert tests[1].startswith("import math\nassert add(1, 2) == 3\n")
    assert "add(1, 1) == 2" in programs[0]["prompt"] and "add(2, 2)" not in programs[0]["prompt"]


def test_data_that_can_not_be_right_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "1+1?", "answer": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: the answer has no ####"):
        list(gsm8k.problems(tmp_path / "a.jsonl"))
    other = problem(1) | {"reward_model": {"ground_truth": "3"}}
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [problem(1), other])))
    with pytest.raises(DataError, match=r"b\.jsonl:2: .*another answer"):
        list(dapo_math.problems(tmp_path / "b.jsonl"))
    (tmp_path / "c.jsonl").write_text(json.dumps(program(1) | {"test_list": []}) + "\n")
    with pytest.raises(DataError, match=r"c\.jsonl:1: the task has no assert"):
        list(code_agent.tasks(tmp_path / "c.jsonl"))


@named
def test_every_recipe_can_start_on_its_gpus_and_has_a_file_for_slurm(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made(tmp_path)
    shutil.copytree(ROOT / f"examples/planning/{recipe.model}", tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    machine = ["--nodes", str(recipe.nodes), "--gpus-per-node", str(recipe.gpus)]
    given = [str(ROOT / f"examples/{recipe.file}.yaml"), "model.path=model", *machine]
    assert launch.main(["slurm", *given, "--time", "24:00:00"]) == 0
    said = capsys.readouterr().out
    assert f"processes   {recipe.nodes * recipe.gpus} = " in said
    config = load(ROOT / f"examples/{recipe.file}.yaml")
    script = (tmp_path / config.trainer.output / "slurm/run.sbatch").read_text()
    assert f"#SBATCH --nodes={recipe.nodes}\n" in script
    assert "restarts    begin anew" not in said


@named
def test_the_readme_has_what_the_plan_says(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    readme = (ROOT / f"examples/{recipe.file}.yaml").with_name("README.md").read_text()
    given = [f"examples/{recipe.file}.yaml", f"model.path=examples/planning/{recipe.model}"]
    given += ["--gpus", str(recipe.nodes * recipe.gpus), "--gpu-memory", "80"]
    assert plan.main(given) == 0
    said = re.sub(r"; planned in .*", "", capsys.readouterr().out)
    whole = "\n".join(line.rstrip() for line in said.strip().splitlines())
    assert f"```text\n$ rftmega plan {' '.join(given)}\n{whole}\n```" in readme
    assert "It has not been run" in readme


def save_model(folder: Path, variant: str) -> None:
    """A tiny model with a token a character, whose template knows of tools and of thinking."""
    symbols = ["<pad>", "<eos>", "\n", *map(chr, range(32, 127))]
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    encode = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    encode.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    )
    save_tiny(folder, variant, vocab_size=len(symbols), eos_token_id=1, max_position_embeddings=512)
    encode.save_pretrained(folder)


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", RUN, ids=lambda recipe: recipe.file)
def test_a_tiny_model_goes_through_every_line(recipe: Recipe, tmp_path: Path) -> None:
    made(tmp_path)
    save_model(tmp_path / "model", recipe.tiny)
    config = ROOT / f"examples/{recipe.file}.yaml"
    changed = (*SMALL, *recipe.shrunk, f"model.path={tmp_path / 'model'}")
    most = [f"algorithm.updates_per_epoch={min(load(config).algorithm.updates_per_epoch, 2)}"]
    done = run_warm(
        ROOT / "train_rl.py",
        [str(config), *changed, *most, "--processes", "2"],
        folder=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    output = tmp_path / load(config).trainer.output
    found = lines(output / "metrics.jsonl")
    assert [line["step"] for line in found] == [0, 1]
    judged = f"_{load(config).trainer.eval_accuracy}"
    assert any(name.startswith("eval_") and name.endswith(judged) for name in found[-1])
    assert (output / "policy/config.json").is_file()
    assert (output / "checkpoints/latest").is_file()
