"""Computes row counts and checksums of the files that a run reads, so that a resumed run can report
which files have changed.
"""

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig, split_source
from rftmega.config.options.agents import Agent
from rftmega.config.options.environments import Tools
from rftmega.config.user_code.functions import GIVEN
from rftmega.data.sampler import PromptOrder
from rftmega.models.hf.checksums import files_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
TEXTS = (".txt", ".md")  # suffixes by which reward.judge_template names a file


def inputs_of(
    config: RunConfig,
    order: PromptOrder[Any],
    held_out: Mapping[str, Sized],
    ptx: PromptOrder[Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns option (and file name) -> row count and SHA-256 for each input of the run: data, user
    code, templates, and the files of model folders except weights.

    `order`, `held_out` and `ptx` are the loaded training, evaluation and PTX data. A pipe gets no
    checksum.
    """
    rows = rows_of(config, order, held_out, ptx)
    found: dict[str, dict[str, Any]] = {
        name: dict(described(source)) for name, source in sources_of(config)
    }
    for name, count in rows.items():
        found[name] = {"rows": count} | found.get(name, {})
    return {name: known for name, known in found.items() if known}


def rows_of(
    config: RunConfig,
    order: PromptOrder[Any],
    held_out: Mapping[str, Sized],
    ptx: PromptOrder[Any] | None,
) -> dict[str, int]:
    """Returns data option -> number of rows (records); arguments as of `inputs_of`."""
    mixed = bool(config.data.sources)
    found = {
        f"data.sources.{name}" if mixed else "data.train": size
        for name, size in order.sizes.items()
    }
    found |= {_held_out(name): len(rows) for name, rows in held_out.items()}
    return found | ({} if ptx is None else {"data.ptx": sum(ptx.sizes.values())})


def sources_of(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yields (option, file or folder) for every input except weights."""
    data = config.data
    given = {"data.train": data.train, "data.ptx": data.ptx, "rollout.order": config.rollout.order}
    given |= {"data.chat_template_file": data.chat_template_file}
    given |= {f"data.sources.{source}": source for source in data.sources}
    given |= {_held_out(name): source for name, source in data.held_out.items()}
    if config.reward.judge_template.endswith(TEXTS):
        given["reward.judge_template"] = config.reward.judge_template
    yield from ((name, split_source(source)[0]) for name, source in given.items() if source)
    for option, references in _functions(config).items():
        for place in {reference.rpartition(":")[0] for reference in references} - {"", GIVEN}:
            if (file := _file_of(place)) is not None:
                yield f"{option} {file.name}", file
    yield from ((f"plugins {Path(file).name}", Path(file)) for file in config.plugins)
    models = {"model.path": config.model.path, "critic.path": config.critic.path}
    models |= {
        "reward.model_path": config.reward.model_path,
        "reward.cost_path": config.reward.cost_path,
    }
    for option, folder in models.items():
        if folder and Path(folder).is_dir():
            beside = [file for file in files_of(Path(folder)) if file.suffix not in WEIGHTS]
            yield from ((f"{option} {file.name}", file) for file in beside)


def _held_out(name: str) -> str:
    return f"data.evals.{name}" if name else "data.eval"


def _functions(config: RunConfig) -> dict[str, Sequence[str]]:
    found: dict[str, Sequence[str]] = {"reward.functions": config.reward.functions}
    if isinstance(config.environment, Tools):
        found["environment.tools"] = config.environment.tools
    if isinstance(config.environment, Agent):
        found["environment.function"] = [config.environment.function]
    return found


def _file_of(place: str) -> Path | None:
    """Returns the file of user code, where `place` is a path FILE.py or the name of a module; None
    if the module has no file.
    """
    if place.endswith(".py"):
        return Path(place)
    spec = importlib.util.find_spec(place)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def described(path: Path) -> dict[str, str]:
    files = (
        [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    )
    if not all(file.is_file() for file in files):  # a pipe can be read only once
        return {}
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            own = hashlib.file_digest(stream, "sha256")
        if path.is_file():
            return {"sha256": own.hexdigest()}
        whole.update(f"{file.relative_to(path)}\0{own.hexdigest()}\n".encode())
    return {"sha256": whole.hexdigest()}
