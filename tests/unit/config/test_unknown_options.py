"""Unknown options: close spellings are suggested, names of other frameworks are looked up in the
table of the documentation.
"""

import re
from pathlib import Path

import pytest

from rftmega.config import load
from rftmega.config.tree import options, sections, unions
from rftmega.config.unknown_options import closest, named_elsewhere, rows, unknown
from rftmega.core.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs/from_other_systems.md"
KNOWN = list(options())

# every field of GRPOConfig in TRL 1.16, with those of transformers' TrainingArguments
GRPO_CONFIG = Path(__file__).with_name("grpo_config_fields.txt").read_text().split()

# options of other frameworks, with the name of ours that the error must contain
COUNTERPARTS = Path(__file__).with_name("counterparts.txt").read_text().split()


@pytest.mark.parametrize(
    ("name", "told", "not_told"),
    [
        ("epsilon", "of TRL: algorithm.policy_loss.low, high", "optimizer.epsilon"),
        ("trainer.epsilon", "of TRL: algorithm.policy_loss.low, high", "optimizer.epsilon"),
        ("importance_sampling_level", "algorithm.recipe: gspo", "importance_sampling.type"),
        ("trainer.total_training_steps", "of verl: trainer.steps", "eval_min_p"),
        (
            "steps_per_generation",
            "updates_per_epoch to steps_per_generation / gradient_accumulation_steps",
            "Did you mean",
        ),
        ("data.apply_chat_template_kwargs", "of verl: data.chat_template_kwargs", "Did you mean"),
        ("actor_rollout_ref.rollout.n", "of verl: rollout.samples_per_prompt", "Did you mean"),
        ("n_samples_per_prompt", "of LightRFT: rollout.samples_per_prompt", "Did you mean"),
        ("optimizer.epsilom", "Did you mean optimizer.epsilon?", "of TRL"),
        ("rollout.what_is_this", "--help", "Did you mean"),
    ],
)
def test_what_is_suggested_is_spelt_alike_or_documented(
    name: str, told: str, not_told: str
) -> None:
    said = unknown(name, KNOWN)
    assert told in said
    assert not_told not in said


def test_a_suggestion_differs_from_what_was_written_in_few_letters() -> None:
    """Of every option with a letter missing, doubled or changed, that option is suggested."""
    for option in KNOWN[::5]:
        for at in (1, len(option) // 2, len(option) - 1):
            for typo in (option[:at] + option[at + 1 :], option[:at] + "q" + option[at:]):
                if typo.count(".") != option.count(".") or typo in KNOWN:
                    continue
                near = closest(typo, KNOWN)
                assert near == option or _distance(typo, near) <= _distance(typo, option), typo


def _distance(a: str, b: str) -> int:
    """Returns the edits from one text to the other (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def test_every_row_of_the_page_is_known_to_the_error() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `", line)]
    assert len(lines) > 100
    for line in lines:
        first = re.findall(r"`([^`]+)`", line)[0].lstrip("-").partition("=")[0].partition(" ")[0]
        assert named_elsewhere(first), line
    assert len(rows()) >= len(lines)


def test_every_option_that_the_page_names_first_is_one() -> None:
    """The page's own mistakes would be told to users."""
    sections = {option.rpartition(".")[0] for option in KNOWN} | set(KNOWN)
    for line in PAGE.read_text().splitlines():
        if not re.match(r"\| .* \| `[a-z_]+\.", line):
            continue
        name = re.findall(r"`([a-z_.]+)", line.rpartition("| `")[1] + line.rpartition("| `")[2])[0]
        if name.startswith("rftmega."):
            continue  # a function
        parts = {f"{name}.type", name.rstrip("."), name.rpartition(".")[0]}
        assert parts & (sections | set(KNOWN)), line


def test_at_least_120_names_of_other_frameworks_are_told_their_counterparts() -> None:
    pairs = dict(zip(COUNTERPARTS[::2], COUNTERPARTS[1::2], strict=True))
    assert len(pairs) >= 120
    said = {name: unknown(name, KNOWN) for name in pairs}
    assert {name for name in pairs if "tells users of" not in said[name]} == set()
    wrong = {name: said[name] for name, ours in pairs.items() if ours not in said[name]}
    assert not wrong


def test_every_option_of_trl_s_grpo_config_has_a_row() -> None:
    assert len(GRPO_CONFIG) == 189
    assert [name for name in GRPO_CONFIG if "users of TRL" not in unknown(name, KNOWN)] == []


def test_the_counterpart_follows_the_value() -> None:
    assert "users of TRL (loss_type=grpo): algorithm.loss_aggregation: sequence_mean." in unknown(
        "loss_type", KNOWN, "grpo"
    )
    assert "sequence_mean" not in unknown("loss_type", KNOWN, "dr_grpo")
    assert "scale_by_std: false" in unknown("scale_rewards", KNOWN, value=False)
    assert "resume: none" not in unknown("resume_from_checkpoint", KNOWN, "out/checkpoint-50")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("+actor_rollout_ref.rollout.n", "users of verl: rollout.samples_per_prompt"),
        ("rollout.n", "users of verl: rollout.samples_per_prompt"),
        ("critic.optim.lr", "users of verl: critic.optimizer.learning_rate."),
        ("actor_rollout_ref.actor.profiler.tool_config.nsys.discrete", "logging.timeline"),
        ("peft_config.layers_pattern", "users of TRL: LoRA: model.lora.rank"),
        ("actor_rollout_ref.model.lora.alpha", "users of verl: model.lora.alpha."),
        ("wandb_org", "WANDB_ENTITY"),
        ("max_num_seqs", "users of verl: rollout.max_batch."),
        ("model.pth", "Did you mean model.path?"),
        ("rollout.enginee", "Did you mean rollout.engine?"),
        ("model.lorra.rank", "Did you mean model.lora.rank?"),
        ("what.is.enable", "--help"),
    ],
)
def test_an_option_is_found_by_its_section_or_its_end_but_not_by_a_common_word(
    name: str, told: str
) -> None:
    assert told in unknown(name, KNOWN)


def test_each_of_our_names_in_the_right_column_exists() -> None:
    known = {*KNOWN, *sections(), *unions()}
    roots = {name.partition(".")[0] for name in known}
    lines = [line for line in PAGE.read_text().splitlines() if line.count("|") == 3]
    quoted = [name for line in lines for name in re.findall(r"`([^`]+)`", line.split("|")[2])]
    dotted = [
        found[0] for name in quoted if (found := re.match(r"[a-z_0-9]+(\.[a-z_0-9]+)+", name))
    ]
    ours = [name for name in dotted if name.partition(".")[0] in roots]
    assert len(ours) > 400
    assert {name for name in ours if name not in known} == set()
    assert {option for row in rows() for option, _ in row.options} <= known


def test_nested_yaml_of_another_framework_is_told_each_counterpart(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        "actor_rollout_ref: {rollout: {n: 8}, actor: {ppo_epochs: 2}}\nrollout: {n: 8}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(raised.value).count("users of verl: rollout.samples_per_prompt") == 2
    assert "users of verl: algorithm.epochs_per_rollout" in str(raised.value)


def test_a_run_that_is_written_for_trl_hears_of_the_table(config_file: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(config_file, ["epsilon=0.2", "optimizer.epsilon=1e-8"])
    assert "epsilon is not an option here" in str(raised.value)
    assert "from_other_systems.md" in str(raised.value)
