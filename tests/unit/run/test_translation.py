"""`rftmega init --from`: options of scripts for TRL and of command lines for verl."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rftmega import config as configuration
from rftmega.config.tree import unions
from rftmega.config.unknown_options import rows
from rftmega.core.errors import ConfigError
from rftmega.run.foreign_source import Source, read_trl, read_verl
from rftmega.run.translation import translated
from rftmega.tools import init

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "org/small"
first, second = 1, 2
data = load_dataset("org/tasks", split="train")
args = GRPOConfig(
    "out", num_generations=4, per_device_train_batch_size=2, gradient_accumulation_steps=8,
    steps_per_generation=16, max_steps=300, eval_steps=50, warmup_steps=10, loss_type="grpo",
    beta=0.04, epsilon=0.1, lr_scheduler_type="cosine", importance_sampling_level="sequence",
    scale_rewards=False, top_p=0.9, report_to="wandb", hub_token="hf_123", not_known=1,
    max_completion_length=second, **more,
)
trainer = GRPOTrainer(
    MODEL, reward_funcs=[f], args=args, train_dataset=data,
    peft_config=LoraConfig(r=16, target_modules=["q_proj"]),
)
"""
COMMAND = """
set -x
# what isn't a command
export A=b
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/train.parquet data.val_files=test.parquet \\
    data.train_batch_size=1024 data.max_prompt_length=512 \\
    actor_rollout_ref.model.path=org/model \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_epochs=2 \\
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=5 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.strategy=fsdp2 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    +actor_rollout_ref.rollout.n=5 trainer.logger='["console","wandb"]' \\
    trainer.save_freq=20 trainer.test_freq=-1 trainer.total_training_steps=90 "$@"
echo model.path=other
"""


def left_of(found: Any, name: str) -> str:
    (line,) = [line for line in found.left if line.startswith(f"{name}=")]
    return str(line)


def test_a_script_for_trl_becomes_a_config() -> None:
    found = translated("TRL", read_trl(SCRIPT), processes=4)
    expected = {
        "model.path": "org/small",
        "model.lora.rank": 16,
        "model.lora.alpha": 8,
        "model.lora.targets": ["q_proj"],
        "rollout.samples_per_prompt": 4,
        "trainer.prompts_per_step": 32,
        "algorithm.updates_per_epoch": 2,
        "trainer.steps": 150,
        "trainer.eval_every": 25,
        "optimizer.warmup_steps": 10,
        "optimizer.schedule": "cosine",
        "optimizer.weight_decay": 0,
        "algorithm.loss_aggregation": "sequence_mean",
        "algorithm.kl.coef": 0.04,
        "algorithm.policy_loss.type": "gspo",
        "algorithm.policy_loss.low": 0.1,
        "algorithm.policy_loss.high": 0.1,
        "algorithm.advantage.scale_by_std": False,
        "trainer.output": "out",
        "trainer.seed": 42,
    }
    assert {name: found.options.get(name) for name in expected} == expected
    assert "data.train" not in found.options


def test_what_has_another_meaning_or_no_value_is_listed() -> None:
    found = translated("TRL", read_trl(SCRIPT), processes=4)
    assert "only for evaluation: trainer.eval_top_p" in left_of(found, "top_p")
    assert "logging.wandb" in left_of(found, "report_to")
    assert "no row of the tables" in left_of(found, "not_known")
    assert "reward.functions" in left_of(found, "reward_funcs")
    assert "load_dataset" in left_of(found, "train_dataset")
    assert "known only when the program runs" in left_of(found, "max_completion_length")
    assert "hf_123" not in "".join(found.left)


def test_without_the_number_of_processes_batch_sizes_are_listed() -> None:
    found = translated("TRL", Source({"per_device_train_batch_size": 2, "max_steps": 9}, {}))
    assert "trainer.prompts_per_step" not in found.options
    assert "formula" in left_of(found, "per_device_train_batch_size")
    assert found.left[0].startswith("the model is not known")
    whole = translated("TRL", Source({"generation_batch_size": 24, "num_generations": 8}, {}))
    assert whole.options["trainer.prompts_per_step"] == 3
    uneven = translated("TRL", Source({"generation_batch_size": 20, "num_generations": 8}, {}))
    assert "trainer.prompts_per_step" not in uneven.options


def test_a_command_line_for_verl_becomes_a_config() -> None:
    found = translated("verl", read_verl(COMMAND))
    expected = {
        "backend": "fsdp",
        "model.path": "org/model",
        "data.eval": "test.parquet",
        "trainer.prompts_per_step": 1024,
        "algorithm.updates_per_epoch": 4,
        "algorithm.epochs_per_rollout": 2,
        "optimizer.learning_rate": 3e-6,
        "optimizer.warmup_steps": 40,  # 5 rollouts of 4 x 2 optimizer steps
        "algorithm.kl.coef": 0.002,
        "algorithm.policy_loss.dual": 3,
        "rollout.samples_per_prompt": 5,
        "rollout.max_prompt_tokens": 512,
        "trainer.steps": 90,
        "trainer.eval_every": 0,
        "checkpoint.every": 20,
    }
    assert {name: found.options.get(name) for name in expected} == expected
    assert "$HOME/train.parquet" in left_of(found, "data.train_files")
    assert "in tokens" in left_of(found, "actor.ppo_micro_batch_size_per_gpu")
    assert "logging.wandb" in left_of(found, "trainer.logger")
    assert any("$@" in line for line in found.left)


@pytest.mark.parametrize(("system", "text"), [("trl", SCRIPT), ("verl", COMMAND)])
def test_the_written_file_can_be_loaded(
    system: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, target = tmp_path / "program", tmp_path / "run.yaml"
    program.write_text(text)
    given = ["--from", system, str(program), "--output", str(target)]
    assert init.main(given) == 0
    config = configuration.load(target)
    assert config.model.path.startswith("org/")
    said = capsys.readouterr().out
    assert "not translated (" in said
    comments = [line for line in target.read_text().splitlines() if line.startswith("#")]
    assert all(line[4:] in "".join(comments) for line in said.splitlines()[2:])
    assert init.main(given) == 2  # the file is there already
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (read_trl, "args = GRPOConfig(", "no Python"),
        (read_trl, "args = SFTConfig()", "no GRPOConfig"),
        (read_verl, "echo 'open", "no shell script"),
        (read_verl, "python3 train.py a=1", "no command runs verl"),
    ],
)
def test_a_program_that_cannot_be_read_is_refused(read: Any, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(text)


def test_a_name_has_a_value_only_if_it_is_assigned_once_and_alone() -> None:
    text = (
        "a = 1\nb = 2\nb = 3\nc, d = 4, 5\ne = 6\ne += 1\nGRPOConfig(k=a, l=b, m=c, n=e, o=(1, 2))"
    )
    assert read_trl(text) == Source({"k": 1, "o": [1, 2]}, {"l": "b", "m": "c", "n": "e"})


def test_every_value_that_the_tables_give_an_option_loads() -> None:
    """A value of ours that does not exist would be found out by a user only."""
    pairs = {pair for row in rows() if row.value for pair in row.options if pair[1]}
    assert len(pairs) > 40
    values: dict[str, list[str]] = {}
    for option, value in sorted(pairs):
        values.setdefault(option, []).append(value)
    chosen = {*unions(), "algorithm.recipe"}  # on which other options depend
    parts = {option: own for option, own in values.items() if option in chosen}
    plain = {option: own for option, own in values.items() if option not in parts}
    together = [
        {option: own[at] for option, own in some.items() if at < len(own)}
        for some in (parts, plain)
        for at in range(max(map(len, some.values())))
    ]
    for given in together:
        read = {option: yaml.safe_load(value) for option, value in given.items()}
        configuration.load({"model.path": "a/b", **read})


def test_one_bound_comes_before_the_option_for_both_in_any_order() -> None:
    for given in ({"epsilon_high": 0.3, "epsilon": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.3}):
        found = translated("TRL", Source(given, {})).options
        bounds = found["algorithm.policy_loss.low"], found["algorithm.policy_loss.high"]
        assert bounds == (0.1, 0.3)


def test_cispo_of_trl_caps_the_ratio_itself() -> None:
    given = {"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}
    found = translated("TRL", Source(given, {})).options
    assert found["algorithm.policy_loss.type"] == "cispo"
    assert found["algorithm.policy_loss.high"] == 4.0
    assert found["algorithm.policy_loss.low"] == 1.0


def test_a_value_without_a_row_is_listed_and_none_is_the_default() -> None:
    found = translated("TRL", Source({"bf16": False, "delta": None, "beta": None}, {}))
    assert "the tables have true only" in left_of(found, "bf16")
    assert (
        not {"model.dtype", "algorithm.kl.coef", "algorithm.policy_loss.dual"}
        & found.options.keys()
    )
    assert not [line for line in found.left if line.startswith(("delta", "beta"))]


def test_an_option_that_does_not_load_is_listed_with_the_reason() -> None:
    given = {"num_generations": "many", "temperature": 0.7, "vllm_importance_sampling_cap": 3}
    found = translated("TRL", Source({"model": "a/b", **given}, {}))
    assert "must be a whole number" in left_of(found, "num_generations")
    assert "needs algorithm.importance_sampling.type" in left_of(
        found, "vllm_importance_sampling_cap"
    )
    assert found.options["rollout.temperature"] == 0.7
