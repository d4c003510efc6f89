"""Checks of data files and model folders."""

import math
import os
from pathlib import Path

from rftmega.config.schema import DataConfig, RunConfig
from rftmega.config.sources import LONGEST_CYCLE, shares, split_source
from rftmega.config.task_libraries import refusal, task_source
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_weight_map

READ_FROM = {  # algorithm.task -> options of data that it reads
    "rl": ("label_key", "kind_key", "trailing_assistant", "columns"),
    "sft": ("response_key", "trained_turns", "tools_key"),
    "reward_model": ("chosen_key", "rejected_key", "trailing_assistant", "tools_key"),
    "preference": (
        "chosen_key",
        "rejected_key",
        "desirable_key",
        "trailing_assistant",
        "tools_key",
    ),
}
OF_SINGLE_RESPONSES = ("response_key", "desirable_key", "trailing_assistant", "tools_key")


def training_data(config: RunConfig) -> list[str]:
    """Returns the problems of the training data options, including keys that the task does not
    read.
    """
    data, task, found = config.data, config.algorithm.task, []
    if data.sources and data.train:
        found.append(
            f"data.train={data.train} and data.sources are both given. Leave one out, or name it among the sources."
        )
    if not (data.sources or data.train):
        found.append("data.train must be given, or data.sources.")
    odd = {source: weight for source, weight in data.sources.items() if not 0 < weight < math.inf}
    found += [
        f"data.sources: the weight {weight} of {source} must be positive and finite."
        for source, weight in odd.items()
    ]
    if (
        data.sources
        and not odd
        and (cycle := sum(shares(list(data.sources.values())))) > LONGEST_CYCLE
    ):
        found.append(
            f"data.sources: the weights are exact only after {cycle} examples, more than {LONGEST_CYCLE}. Round them, as to 0.25."
        )
    single = task == "preference" and data.desirable_key
    own = OF_SINGLE_RESPONSES if single else READ_FROM.get(task, ())
    read_here = {*own, *(READ_FROM["sft"] if data.ptx else ())}
    if single and not config.algorithm.preference.takes_labels:
        found.append(
            f"data.desirable_key={data.desirable_key} needs algorithm.preference.type=kto: "
            f"{config.algorithm.preference.type} compares the responses of a pair. Leave it out."
        )
    said = f" and data.desirable_key={data.desirable_key}" if single else ""
    for option in sorted({option for read in READ_FROM.values() for option in read} - read_here):
        if (value := getattr(data, option)) != getattr(DataConfig(), option):
            found.append(
                f"data.{option}={value}: with algorithm.task={task}{said} nothing reads it. Leave it out."
            )
    if data.columns and not config.reads_columns and task == "rl":
        found.append(
            f"data.columns={data.columns}: no reward function, judge or environment reads columns. Leave it out."
        )
    return found + _beside_rewards(config)


def _beside_rewards(config: RunConfig) -> list[str]:
    """Returns the problems of supervised data trained in addition to rewards (data.ptx): a missing
    weight, or too few examples for the optimizer steps.
    """
    algorithm, found = config.algorithm, []
    if algorithm.on_policy_share < 1:
        return _mixed(config)
    if bool(algorithm.ptx_coef) != bool(config.data.ptx):
        found.append(
            f"algorithm.ptx_coef={algorithm.ptx_coef} and data.ptx={config.data.ptx!r} need each other: a weight, and the "
            "answers that are learnt with it."
        )
    elif config.data.ptx and algorithm.steps_per_rollout > config.trainer.prompts_per_step:
        found.append(
            f"{algorithm.steps_per_rollout} optimizer steps a rollout (algorithm.updates_per_epoch="
            f"{algorithm.updates_per_epoch} x algorithm.epochs_per_rollout={algorithm.epochs_per_rollout}) are more than the "
            "examples of data.ptx a step "
            f"(trainer.prompts_per_step={config.trainer.prompts_per_step}). Lower it."
        )
    return found


def _mixed(config: RunConfig) -> list[str]:
    """Returns the problems of completions of data.ptx that teachers train on."""
    algorithm, found = config.algorithm, []
    share = f"algorithm.on_policy_share={algorithm.on_policy_share}"
    if not config.data.ptx:
        found.append(f"{share} needs data.ptx: a file with the completions that are not sampled.")
    if algorithm.ptx_coef:
        found.append(
            f"{share} with algorithm.ptx_coef={algorithm.ptx_coef}: data.ptx is trained on by teachers or with cross "
            "entropy. Set one of them."
        )
    teachers = [teacher for teacher in algorithm.teachers if teacher.signal == "loss"]
    if not teachers:
        found.append(
            f"{share} needs a teacher with signal=loss (algorithm.teachers): only teachers train on completions of data.ptx."
        )
    if any(teacher.reads_columns for teacher in teachers):
        found.append(
            f"{share} with algorithm.teachers[].when, prompt or gate: completions of data.ptx have no such columns. Leave these "
            "options out."
        )
    if any(teacher.vocabulary == "sampled" for teacher in teachers):
        found.append(
            f"{share} with vocabulary=sampled: it is an estimate for tokens that the policy samples. Set it to full or top_k."
        )
    return found


def files(config: RunConfig) -> list[str]:
    """Returns a problem for each file or folder of model and data that does not exist or is
    incomplete.
    """
    found = []
    folder = Path(config.model.path)
    if not folder.is_dir():
        found.append(f"model.path={folder} is not a folder. Give a Hugging Face folder.")
    else:
        if not (folder / "config.json").is_file():
            found.append(f"model.path={folder} holds no config.json.")
        found += _weights(folder)
    if (
        config.critic.path
        and config.algorithm.advantage.needs_critic
        and not (Path(config.critic.path) / "config.json").is_file()
    ):
        found.append(
            f"critic.path={config.critic.path} holds no config.json. Give a Hugging Face folder."
        )
    data = config.data
    found += _missing_sources(config)
    template = data.chat_template_file
    if template and not Path(template).is_file():
        found.append(f"data.chat_template_file={template} is no file.")
    return found


def _missing_sources(config: RunConfig) -> list[str]:
    """Returns a problem for each data source that is neither an existing file or folder, nor names
    tasks that a library can create.
    """
    data, found = config.data, list[str]()
    named = [
        ("data.train=", data.train),
        *(("data.sources: ", source) for source in data.sources),
        ("data.eval=", data.eval),
        ("data.ptx=", data.ptx),
        *((f"data.evals.{name}=", source or " ") for name, source in data.evals.items()),
    ]
    refused: set[str] = set()  # one message for all tasks of a library that is not installed
    # an evaluation has its held-out data as data.train, which nobody gave
    told_once = data.train in data.held_out.values()
    for name, source in named[1:] if told_once else named:
        library = task_source(source)
        if library is None:
            if source and not split_source(source)[0].exists():
                found.append(f"{name}{source} is not a file or folder.")
        elif config.algorithm.task != "rl" or name == "data.ptx=":
            found.append(
                f"{name}{source}: tasks of a library have no completions to train on. Set algorithm.task=rl, or give a file."
            )
        elif (why := refusal(library)) and why not in refused:
            refused.add(why)
            found.append(f"{name}{source}: {why}")
    return found


def _weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if os.path.lexists(index):
        try:
            named = sorted(set(read_weight_map(index).values()))
        except CheckpointError as error:
            return [str(error)]
        return [
            f"model.path={folder}: {index.name} names {n}, which is missing."
            for n in named
            if not (folder / n).is_file()
        ]
    if list(folder.glob("*.safetensors")):
        return []
    said = f"model.path={folder} holds no *.safetensors weights"
    if list(folder.glob("pytorch_model*.bin")):
        return [f"{said}, but *.bin files. Convert them: rftmega convert to-plain {folder} OUT"]
    if files := sorted(folder.glob("*.gguf")):
        return [
            f"{said}, but a GGUF file. Convert it: python examples/smollm/make_model.py OUT --gguf {files[0]}"
        ]
    return [f"{said}. Convert or download them first."]
