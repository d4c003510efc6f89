"""Options that name files and folders, and their common rule: relative paths are relative to the
directory in which the run is started, not to the file that contains them.

Only the `base` of a YAML file, which is not an option, is relative to that file's own folder.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rftmega.config.sources import split_source

NO_CHECKPOINTS = ("auto", "none")  # values of checkpoint.resume
TEXT_FILES = (".txt", ".md")  # suffixes of a judge template that is a file


def is_recipe_path(name: str) -> bool:
    """Returns whether a value of algorithm.recipe is a file's path instead of a recipe's name."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def _itself(value: str) -> str:
    return value


def _of_data(value: str) -> str:
    return str(split_source(value)[0])


def _of_function(value: str) -> str:
    file = value.rpartition(":")[0]
    return file if file.endswith(".py") else ""


def _of_recipe(value: str) -> str:
    return value if is_recipe_path(value) else ""


def _of_template(value: str) -> str:
    return value if value.endswith(TEXT_FILES) else ""


def _of_checkpoint(value: str) -> str:
    return "" if value in NO_CHECKPOINTS else value


# option -> function that returns the path in one of its texts, "" if there is none. For
# data.sources the keys are paths, for other dictionaries the values.
READ: dict[str, Callable[[str], str]] = {
    "plugins": _itself,
    "algorithm.recipe": _of_recipe,
    "model.path": _itself,
    "model.lora.path": _itself,
    "model.lora.evaluated": _itself,
    "critic.path": _itself,
    "rollout.order": _itself,
    "rollout.server_list": _itself,
    "rollout.speculative.path": _itself,
    "rollout.tls_ca": _itself,
    "data.train": _of_data,
    "data.sources": _of_data,
    "data.eval": _of_data,
    "data.evals": _of_data,
    "data.ptx": _of_data,
    "data.media_folder": _itself,
    "data.chat_template_file": _itself,
    "reward.functions": _of_function,
    "reward.judge_template": _of_template,
    "reward.model_path": _itself,
    "reward.cost_path": _itself,
    "environment.tools": _of_function,
    "environment.function": _of_function,
    "environment.python": _itself,
    "checkpoint.resume": _of_checkpoint,
}
WRITTEN = (
    *("trainer.output", "checkpoint.folder", "rollout.weights_folder", "reward.judge_cache"),
)  # need not exist


def misplaced(options: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Returns option -> error message for each path in `options` (dotted name -> value) that does
    not exist in the working directory but does exist relative to `folder`, the folder of the YAML
    file.
    """
    return {
        name: reason
        for name, path_of in READ.items()
        if name in options and (reason := _misplaced(name, options[name], path_of, folder))
    }


def _misplaced(name: str, value: Any, path_of: Callable[[str], str], folder: Path) -> str:
    for text in _texts(name, value):
        path = Path(path_of(text))
        relative = path.name and not path.is_absolute()
        if relative and not _is_there(path) and _is_there(folder / path):
            return (
                f"{name}={text}: there is no {path} in the working directory {Path.cwd()}, which relative paths are from, "
                f"but there is {folder / path}. Write {text.replace(str(path), str(folder / path), 1)}, or start the run "
                f"in {folder.resolve()}."
            )
    return ""


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # for example a name that is too long
        return False


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = list(value) if name == "data.sources" else list(value.values())
    given = value if isinstance(value, list) else [value]
    return [text for text in given if isinstance(text, str)]
