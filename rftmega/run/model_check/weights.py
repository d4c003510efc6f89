"""Checks config.json and the weight files of a model folder. Only headers of files are read."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from rftmega.backends.decoder.describe import describe_any, read_config, tower_of
from rftmega.backends.decoder.meta_decoder import describe as described
from rftmega.backends.megatron.load import HEAD, HEADS, refuse_strangers
from rftmega.config.capabilities import BACKENDS
from rftmega.converters import has_table, instances, table
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object, read_weight_map
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.description import described as without_advice
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.output_head import output_head
from rftmega.model_providers.transformers_decoders import on_meta, refuse_bidirectional
from rftmega.models.hf.hf_folder import INDEX, HFFolder
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.models.hf.stacked_files import open_folder
from rftmega.run.model_check.findings import Finding, note, ok, problem, raised, skipped

DOWNLOAD = "Download this file again."
ROWS = 4096  # of the LM head that are compared at a time


class ReadConfig(NamedTuple):
    """ReadConfig holds config.json as the backends read it."""

    descriptions: Mapping[str, ModelDescription]  # backend -> description, of those that accept it
    refusals: Mapping[str, str]  # backend -> reason


def read(folder: Path, backends: Sequence[str]) -> ReadConfig:
    """Reads config.json as each of `backends` does."""
    accepted: dict[str, ModelDescription] = {}
    refusals: dict[str, str] = {}
    for backend in backends:
        try:
            accepted[backend] = _description(folder, backend)
        except Exception as error:  # also of transformers' own code, given a user's file
            refusals[backend] = raised("config", error).said.removeprefix(f"{folder}: ")
    return ReadConfig(accepted, refusals)


def _description(folder: Path, backend: str) -> ModelDescription:
    if not BACKENDS[backend].any_decoder:
        return without_advice(read_hf_config(folder))
    config = read_config(folder)
    describe_any(config)
    model = on_meta(config, "eager")
    refuse_bidirectional(model)
    output_head(model)
    return described(model, tower_of(folder, config))


def of_config(folder: Path, found: ReadConfig, asked: Sequence[str]) -> Iterator[Finding]:
    """Yields the findings about config.json. `asked`: the backends that the user named; [] if none
    was named.
    """
    if not found.descriptions:
        reasons = list(dict.fromkeys(found.refusals.values()))
        yield problem("config", "; ".join(reasons), _other_model(folder))
        return
    model = next(iter(found.descriptions.values()))
    experts = f", {model.experts.number} experts" if model.experts else ""
    yield ok(
        "config",
        f"{model.family}, {model.parameters:,} parameters, {model.layers} layers{experts}, vocabulary {model.vocabulary} "
        f"({' and '.join(found.descriptions)})",
    )
    for backend, reason in found.refusals.items():
        said = f"backend={backend} refuses it: {reason}"
        if backend not in asked:
            yield note("config", said)
            continue
        others = [name for name, why in usable(folder, found).items() if not why]
        yield problem(
            "config", said, f"Set backend={others[0]}." if others else _other_model(folder)
        )


def _other_model(folder: Path) -> str:
    try:
        known = has_table(read_json_object(folder / "config.json"))
    except CheckpointError:
        return "Repair config.json."
    return (
        "Change this field of config.json, or take another model."
        if known
        else "Take a model that docs/supported_architectures.md lists, or for backend=fsdp one that docs/backends.md describes."
    )


def of_files(folder: Path, found: ReadConfig) -> list[Finding]:
    """Returns the findings about the weight files: files that are cut off or missing, tensors that
    are missing or left over, and an LM head that differs from a tied embedding.
    """
    try:
        broken = list(_broken(folder))
    except CheckpointError as error:
        return [_without_weights(folder, error)]
    if broken or not found.descriptions:
        return broken or [skipped("weights", "config.json is refused")]
    try:
        files = HFFolder(folder)
        refused = {name: list(_tensors(folder, name, found)) for name in found.descriptions}
        heads = list(_other_head(folder, found))
    except Exception as error:
        return [raised("weights", error)]
    if heads or all(refused.values()):  # the backends name the same cause in other words
        return heads or next(iter(refused.values()))
    size = sum(file.stat().st_size for file in files.files)
    said = f"{len(list(files.names))} tensors in {len(files.files)} file(s), {size / 1e9:.2f} GB; none is missing or left over"
    notes = [
        note("weights", f"backend={name}: {own[0].said}") for name, own in refused.items() if own
    ]
    return [ok("weights", said), *notes, *_unlisted(folder, files)]


def usable(folder: Path, found: ReadConfig) -> dict[str, str]:
    """Returns backend -> "" if it can load the folder's tensors, otherwise the reason."""
    result = {}
    for name in found.descriptions:
        try:
            problems = list(_tensors(folder, name, found))
        except Exception as error:
            problems = [raised("weights", error)]
        result[name] = problems[0].said if problems else ""
    return result


def _without_weights(folder: Path, error: CheckpointError) -> Finding:
    if list(folder.glob("pytorch_model*.bin")):
        return problem(
            "weights",
            f"{folder} has *.bin files and no safetensors.",
            f"Convert them: rftmega convert to-plain {folder} OUT",
        )
    return raised("weights", error)


def _broken(folder: Path) -> Iterator[Finding]:
    """Yields a problem for each file of weights that is missing, cut off or no safetensors, and for
    each that lacks tensors of the index.

    Raises CheckpointError for a folder without weights, or an index that can't be read.
    """
    index = folder / INDEX
    if not index.is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        listed: dict[str, str] = {}
        if not names:
            raise CheckpointError(
                f"{folder} holds no *.safetensors weights. Download the model with its weights."
            )
    else:
        listed = read_weight_map(index)
        names = sorted(set(listed.values()))
    for name in names:
        if not (folder / name).is_file():
            yield problem("weights", f"{INDEX} names {name}, which is not in the folder.", DOWNLOAD)
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                held = set(file.keys())
        except (SafetensorError, OSError) as error:
            yield problem("weights", _cut_off(folder / name, error), DOWNLOAD)
            continue
        if missing := sorted(
            tensor for tensor, place in listed.items() if place == name and tensor not in held
        ):
            yield problem(
                "weights",
                f"{INDEX} names {name} for {missing[0]!r} ({len(missing)} such), which is not in that file.",
                DOWNLOAD,
            )


def _cut_off(file: Path, error: Exception) -> str:
    """Returns the reason why a safetensors file can't be read, with the bytes that it lacks."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header = int.from_bytes(start, "little")
        content = stream.read(min(header, size))
    if len(start) < 8 or header > size:
        return f"{file.name} is cut off: it has {size:,} bytes, and not even its header is whole."
    ends = [0]
    for part in content.split(b'"data_offsets":[')[1:]:
        end = part.partition(b"]")[0].rpartition(b",")[2].strip()
        ends.append(int(end) if end.isdigit() else 0)
    whole = 8 + header + max(ends)
    if whole > size:
        return f"{file.name} is cut off: it has {size:,} of its {whole:,} bytes."
    return f"{file.name} can't be read: {error}"


def _unlisted(folder: Path, files: HFFolder) -> Iterator[Finding]:
    """Yields a note if the folder has safetensors files that its index does not name."""
    named = {file.name for file in files.files}
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in named)
    if others:
        yield note("weights", f"{INDEX} does not name {', '.join(others[:3])}; nobody reads it.")


def _tensors(folder: Path, backend: str, found: ReadConfig) -> Iterator[Finding]:
    """Yields a problem for each kind of disagreement between config.json and the tensors."""
    try:
        if BACKENDS[backend].any_decoder:
            from rftmega.backends.fsdp.buildable import refuse_unbuildable  # takes seconds

            refuse_unbuildable(folder)
        else:
            yield from _tensors_of_table(folder, found.descriptions[backend])
    except CheckpointError as error:
        yield raised("weights", error)


def _tensors_of_table(folder: Path, model: ModelDescription) -> Iterator[Finding]:
    config = read_hf_config(folder)
    files, rules = open_folder(folder, config), table(config)
    experts = model.experts.number if model.experts else 0
    missing, others = [], []
    for rule, layer, expert in instances(rules, layers=model.layers, experts=experts):
        names = rule.hf_names(layer, expert)
        if rule.optional and not any(name in files for name in names):
            continue
        for name, tensor in zip(names, rule.hf, strict=True):
            if name not in files:
                missing.append(name)
            elif files.shape_of(name) != tuple(tensor.shape):
                others.append((name, files.shape_of(name), tuple(tensor.shape)))
    if missing:
        missing = sorted(set(missing))
        yield problem(
            "weights",
            f"{folder} lacks {len(missing)} tensor(s) that config.json leads to, {missing[0]!r} first.",
            "Download the folder again, or correct num_hidden_layers, num_experts or tie_word_embeddings in config.json.",
        )
    if others:
        name, shape, wanted = others[0]
        yield problem(
            "weights",
            f"{name} has shape {list(shape)}, and config.json leads to {list(wanted)} ({len(others)} such).",
            "Take the config.json that belongs to these weights.",
        )
    if not missing:
        allowed = HEADS if model.tied else frozenset()
        refuse_strangers(files, rules, config, experts=experts, allowed=allowed)


def _other_head(folder: Path, found: ReadConfig) -> Iterator[Finding]:
    """Yields a problem if embeddings are tied and the folder has another LM head."""
    files = open_quantised(folder, read_json_object(folder / "config.json"))
    tied = any(model.tied for model in found.descriptions.values())
    embeddings = [name for name in files.names if name.endswith("embed_tokens.weight")]
    heads = [name for name in HEADS if name in files]
    if not tied or len(embeddings) != 1 or not heads:
        return
    name, head = embeddings[0], heads[0]
    if files.shape_of(name) == files.shape_of(head) and _equal(files, name, head):
        return
    yield problem(
        "weights",
        f"tie_word_embeddings=true, but {head} is not {name}. One of them is wrong.",
        f"Set tie_word_embeddings=false in config.json if the model was trained with an output head of its own; otherwise "
        f"remove {HEAD}.",
    )


def _equal(files: HFFolder, one: str, other: str) -> bool:
    shape = files.shape_of(one)
    first, second = files.slice_of(one, shape), files.slice_of(other, shape)
    return all(
        torch.equal(first[start : start + ROWS], second[start : start + ROWS])
        for start in range(0, shape[0], ROWS)
    )


def elements_of(folder: Path) -> int:
    """Returns the number of elements of all tensors, as they are in memory when they are loaded."""
    files = open_quantised(folder, read_json_object(folder / "config.json"))
    return sum(math.prod(files.shape_of(name)) for name in files.names)


def config_of(folder: Path) -> dict[str, Any]:
    """Returns the fields of config.json together with those of its text_config, which take
    precedence.
    """
    config = read_json_object(folder / "config.json")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config
