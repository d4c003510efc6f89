"""Writer of model cards, which contain the base model, the training options and the results."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rftmega import __version__
from rftmega.config import RunConfig, without_secrets
from rftmega.config.load import flatten
from rftmega.models.hf.export_folder import MARK
from rftmega.monitoring.history import Step, changes, graded_accuracies, read_history

# a repository's folder in the Hugging Face cache
CACHED = re.compile(r"models--(.+?)--(.+)/snapshots/(\w+)")
TASKS = {
    "rl": "reinforcement learning",
    "sft": "learning given answers",
    "reward_model": "learning preferences: it gives a reward",
    "preference": "preference optimization",
}


def write_model_card(config: RunConfig, metrics: Path) -> None:
    """Writes the model card README.md, made of the run's options and metrics, into the folder of
    the exported model; does nothing if the folder was not written by an export. `metrics`: path of
    metrics.jsonl.
    """
    folder = Path(config.exported)
    if not (folder / MARK).is_file():
        return
    (folder / "README.md").write_text(model_card(config, read_history(metrics)))


def model_card(config: RunConfig, history: Sequence[Step]) -> str:
    """Returns the model card as Markdown, with the metadata header that the Hugging Face Hub reads.
    `history`: lines of metrics.jsonl, one per step, beginning with the metrics from before
    training.
    """
    name = config.trainer.push_to_hub or Path(config.trainer.output).name
    base, revision = base_of(config.model.path)
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["rftmega"]}
    if revision:
        head["base_model"] = base
    if config.algorithm.task == "rl":
        head["tags"].append("reinforcement-learning")
    if config.algorithm.task != "reward_model":
        head["pipeline_tag"] = "text-generation"
    at = f" (revision {revision})" if revision else ""
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {name}",
        f"Trained from `{base}`{at} by {TASKS[config.algorithm.task]}, {config.trainer.steps} steps, with rftmega "
        f"{__version__}.",
    ]
    if table := _table(history, config.trainer.eval_accuracy):
        parts += ["## Figures", table]
    options = yaml.safe_dump(chosen_options(config), sort_keys=False, allow_unicode=True)
    parts += [
        "## Options",
        "Those that are not the defaults:",
        f"```yaml\n{options}```",
    ]
    return "\n\n".join(parts) + "\n"


def base_of(path: str) -> tuple[str, str]:
    """Returns the repository name and the revision of a model in the Hugging Face cache, by the
    path of its folder; (folder name, "") for any other path.
    """
    if cached := CACHED.search(path):
        organisation, name, revision = cached.groups()
        return f"{organisation}/{name}", revision
    return Path(path).name, ""


def chosen_options(config: RunConfig) -> dict[str, Any]:
    """Returns the options of the config whose values differ from the defaults, by dotted name;
    secrets are left out.
    """
    defaults = flatten(without_secrets(RunConfig()))
    now = flatten(without_secrets(config))
    return {name: value for name, value in now.items() if value != defaults.get(name)}


def _table(history: Sequence[Step], part: str) -> str:
    """Returns a Markdown table of the first and last value of each main metric (see
    `history.CHIEF`); "" if there are none. `history`: lines of metrics.jsonl; `part`: the reward
    component trainer.eval_accuracy.
    """
    left_out = graded_accuracies(history, part)
    found = changes(history)
    if not found:
        return ""
    rows = ["| metric | first | last |", "|---|---|---|"]
    for name, change in found.items():
        if name in left_out:
            continue
        first = f"{change.first:.4g} (step {change.first_step})"
        last = f"{change.last:.4g} (step {change.last_step})"
        rows.append(f"| {name} | {first} | {last} |")
    return "\n".join(rows)
