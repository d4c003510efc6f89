"""Builds the config of an evaluation: the options of a run that affect completions or their scores,
and defaults for all other options.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rftmega import config as configuration
from rftmega.checkpoints.reader import MANIFEST
from rftmega.config import DataConfig, LoRA, RolloutConfig, RunConfig, TrainerConfig
from rftmega.config.secrets import NOT_STORED
from rftmega.config.validation.data import READ_FROM
from rftmega.core.errors import ConfigError
from rftmega.core.json_files import read_json_object
from rftmega.monitoring.history import read_history
from rftmega.monitoring.observers.run_reports import CONFIG
from rftmega.run.conversion.run_checkpoint import checkpoint_in
from rftmega.runtime.parallel.process_group import launched_size

HF = "config.json"  # of a Hugging Face folder; a run's own has another name
# sections and options that a run's and its evaluation's completions depend on
SECTIONS = ("plugins", "strategy", "rollout", "data", "reward", "environment", "faults")
OF_MODEL = ("dtype", "ignore_config_fields", "trust_remote_code")
# options of the schedule of a training, which evaluation doesn't read
OF_ROLLOUT = (
    *("samples_per_prompt", "train_samples_per_prompt", "order", "ahead", "on_update"),
    *("router_replay", "temperature"),
)
# components that --rewards may name
PARTS = ("exact_match", "math", "multiple_choice", "code", "task_library", "judge")


class Candidate(NamedTuple):
    """Candidate is a model to evaluate."""

    label: str  # in the results, such as "policy" or "step_000100"
    folder: str  # Hugging Face folder, or a model of the Hub
    step: int | None  # of the run that trained it; None: unknown


def refuse_processes() -> None:
    """Raises ConfigError if a launcher started several processes: each would evaluate everything, and
    append to the same files.
    """
    if (processes := launched_size()) > 1:
        raise ConfigError(
            f"rftmega evaluate runs in one process, and {processes} were launched. Start it without a launcher; to use several "
            "devices, start servers (rftmega serve) and set strategy=separate."
        )


def is_run(model: str) -> bool:
    """Returns whether `model` is the output folder of a run."""
    folder = Path(model)
    return not (folder / HF).is_file() and any(
        (folder / name).exists() for name in ("metrics.jsonl", CONFIG, "checkpoints", "policy")
    )


def candidates_of(model: str) -> list[Candidate]:
    """Returns the models that the argument MODEL stands for: itself, or all exported policies of a
    run, in the order of their steps.

    Raises ConfigError for a folder without a model in Hugging Face's format.
    """
    folder = Path(model)
    if not folder.exists() or (folder / HF).is_file():
        return [Candidate(folder.name or model, model, None)]
    if is_run(model):
        found = [*_checkpoints(folder), *_exports(folder)]
        if found:
            return found
    if (saved := checkpoint_in(folder)) is not None:
        raise ConfigError(
            f"{model} holds a distributed checkpoint ({saved}) and no model in Hugging Face's format. Convert it:\n"
            f"    rftmega convert to-hf {saved} OUT\n"
            "and evaluate OUT. checkpoint.hf=true makes a run export each of its checkpoints."
        )
    if (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{model} is a distributed checkpoint. Convert it:\n    rftmega convert to-hf {model} OUT\nand evaluate OUT."
        )
    raise ConfigError(
        f"{model} holds no model (no {HF}), and is no output folder of a run with an exported policy. Give one of these, or a "
        "model of the Hub (org/name)."
    )


def _checkpoints(run: Path) -> Iterator[Candidate]:
    """Yields the checkpoints of a run that were exported as well (checkpoint.hf)."""
    for folder in sorted(run.glob("checkpoints/step_*")):
        if (folder / "hf" / HF).is_file():
            yield Candidate(folder.name, str(folder / "hf"), int(folder.name.removeprefix("step_")))


def _exports(run: Path) -> Iterator[Candidate]:
    """Yields the models that a run exported at its end."""
    history = read_history(run / "metrics.jsonl")
    last = int(history[-1]["step"] or 0) if history else None
    for name in ("policy", "policy_ema"):
        if (run / name / HF).is_file():
            yield Candidate(name, str(run / name), last)


def stored_options(run: Path) -> dict[str, Any]:
    """Returns the options of a run as it stored them in its output folder, or in its last
    checkpoint, without secrets.

    Raises ConfigError if neither is there.
    """
    if (run / CONFIG).is_file():
        return without_unknown(read_json_object(run / CONFIG, raising=ConfigError))
    if (saved := checkpoint_in(run)) is not None:
        manifest = read_json_object(saved / MANIFEST, raising=ConfigError)
        return without_unknown(manifest["config"])
    raise ConfigError(
        f"{run} does not say with which options it ran (no {CONFIG}, and no checkpoint). Give its YAML file: --config FILE."
    )


def without_unknown(tree: Any) -> Any:
    """Returns nested options without those whose values are secrets, which were not stored."""
    if isinstance(tree, Mapping):
        return {name: without_unknown(value) for name, value in tree.items() if value != NOT_STORED}
    return tree


def overrides_of(
    data: Sequence[str], rewards: Sequence[str], samples: int | None, pass_at: Sequence[int]
) -> list[str]:
    """Returns the overrides that --data, --rewards, --samples and --k stand for."""
    found = []
    if data:
        named = [_named(each) for each in data]
        alone = len(named) == 1 and not named[0][0]
        if not alone and not all(name for name, _ in named):
            raise ConfigError("--data: give each of several files a name, as easy=FILE.")
        sets = "{" + ", ".join(f"{name}: {_quoted(path)}" for name, path in named) + "}"
        found += [f"data.eval={named[0][1]}" if alone else f"data.evals={sets}"]
        found += ["data.evals={}" if alone else "data.eval="]
    functions = [each for each in rewards if each not in PARTS]
    if rewards:
        found += [f"reward.functions=[{', '.join(map(_quoted, functions))}]"]
        found += [f"reward.{each}=1" for each in rewards if each in PARTS]
        found += [f"trainer.eval_accuracy={rewards[0].rpartition(':')[2]}"]
    if samples is not None:
        found += [f"trainer.eval_samples={samples}"]
        found += ["trainer.eval_pass_at=[]"] if not pass_at else []
    if pass_at:
        found += [f"trainer.eval_pass_at=[{','.join(map(str, pass_at))}]"]
    return found


def _named(given: str) -> tuple[str, str]:
    name, equals, path = given.partition("=")
    return (name, path) if equals and name.isidentifier() else ("", given)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def loaded(
    given: str | Path | Mapping[str, Any], model: str, output: str, overrides: Sequence[str]
) -> RunConfig:
    """Returns the config of an evaluation (see `of_run`) from the options of a run, with
    `overrides` on top. `given`: the run's YAML file, or its stored options; `model`: folder of the
    model; `output`: folder of the results.

    Raises ConfigError as `config.load` does, and if the options name no evaluation set.
    """
    if isinstance(given, Mapping):
        given = _without_unread(given)
    read = configuration.load(given, [f"model.path={model}", *overrides])
    if not read.data.held_out:
        raise ConfigError("On which prompts? Give --data FILE, or data.eval in --config.")
    return of_run(read, output)


def _without_unread(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Removes trainer.eval_accuracy from the stored options of a run without evaluation sets. Its
    stored default then gives way to the default for the evaluation's own prompts and reward.
    """
    data, trainer = stored.get("data", {}), dict(stored.get("trainer", {}))
    if not (data.get("eval") or data.get("evals")):
        trainer.pop("eval_accuracy", None)
    return {**stored, "trainer": trainer}


def of_run(config: RunConfig, output: str) -> RunConfig:
    """Returns the config of an evaluation with the options of a run that decide on completions and
    their scores.
    """
    defaults = RunConfig()
    kept = {name: getattr(config, name) for name in SECTIONS}
    read = set(READ_FROM["rl"])
    unread = {name for names in READ_FROM.values() for name in names} - read
    plain = {name: getattr(DataConfig(), name) for name in unread}
    first = next(iter(config.data.held_out.values()))
    kept["data"] = replace(config.data, train=first, sources={}, ptx="", **plain)
    schedule = {name: getattr(RolloutConfig(), name) for name in OF_ROLLOUT}
    kept["rollout"] = replace(config.rollout, **schedule)
    kept["reward"] = replace(config.reward, model=0.0, model_path="", cost=0.0, cost_path="")
    kept["faults"] = replace(config.faults, max_restarts=0)
    model = {name: getattr(config.model, name) for name in OF_MODEL}
    answering = {name: value for name, value in asdict(config.trainer).items() if _is_read(name)}
    trainer = TrainerConfig(
        **answering,
        output=output,
        export=False,
        seed=config.trainer.seed,
        max_tokens_per_micro_batch=config.rollout.max_row_tokens,
    )
    quantised = config.rollout.quantization != "none"  # only one backend knows what not to round
    return replace(
        defaults,
        **kept,
        backend=config.backend if quantised else "fsdp",
        model=replace(defaults.model, path=config.model.path, lora=LoRA(), **model),
        trainer=trainer,
    )


def _is_read(option: str) -> bool:
    return option.startswith("eval_") and option != "eval_every"
