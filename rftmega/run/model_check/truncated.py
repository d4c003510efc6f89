"""Makes a copy of a model folder with its first layers only, and with plain weights."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rftmega.converters import OF_PREDICTORS
from rftmega.converters.block_scales import FIELD
from rftmega.core.json_files import read_json_object
from rftmega.models.hf.hf_folder import (
    HFFolder,
    PlannedTensor,
    copy_companions,
    shards_of,
    write_index,
    write_shard,
)
from rftmega.models.hf.quantised_folder import is_quantised, open_quantised

# number of layers, as configs name it
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
# parts beside the decoder, whose layers all stay
TOWERS = re.compile(r"(?:^|\.)(?:visual|vision_\w+|audio_\w+|multi_modal_projector)\.")
INDEXES = re.compile(r".*(?:layers?|layer_ids|idxs|indices|indexes)$")
NO_LAYERS = ("architectures", "eos_token_id")  # lists that may be as long by chance
FEWEST = 2
FILE_BYTES = 2 * 2**30


def layers_in(config: Mapping[str, Any], names: Iterable[str]) -> int:
    """Returns the number of decoder layers in config.json; if config.json has no such field, the
    number of layers that occur in the tensor `names`.
    """
    text = config.get("text_config")
    for fields in (text if isinstance(text, dict) else {}, config):
        for name in COUNTS:
            value = fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return max((layer_of(name) or 0 for name in names), default=0) + 1


def shortened(config: Mapping[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """Returns config.json for a copy with the first `kept` of `layers` layers. Changes numbers of
    layers, lists and texts with one entry per layer, and lists of layer numbers.
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("vision_config", "audio_config"):
            found[name] = value
        elif name == "text_config" and isinstance(value, dict):
            found[name] = shortened(value, layers, kept)
        else:
            found[name] = _short(name, value, layers, kept)
    return found


def _short(name: str, value: Any, layers: int, kept: int) -> Any:
    if name in COUNTS:
        return kept if value == layers else value
    if name in OF_PREDICTORS:
        return 0
    if name == "max_window_layers" and isinstance(value, int):
        return min(value, kept)
    if _has_entries(name, value, layers):
        return value[:kept]
    if isinstance(value, list) and INDEXES.match(name) and all(map(_is_index, value)):
        return [each for each in value if each < kept]
    if isinstance(value, dict) and name == "per_layer_config":
        return {key: each for key, each in value.items() if not key.isdigit() or int(key) < kept}
    return value


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _has_entries(name: str, value: Any, layers: int) -> bool:
    """Returns whether a field of config.json is a list, or a text of letters, with an entry for each
    layer.
    """
    if not isinstance(value, list | str) or len(value) != layers:
        return False
    return "pattern" in name if isinstance(value, str) else name not in NO_LAYERS


def layer_of(name: str) -> int | None:
    """Returns the number of the decoder layer that a tensor belongs to; None if it is in none."""
    found = LAYER.search(name)
    return int(found[1]) if found and not TOWERS.search(name[: found.start() + 1]) else None


def kinds_of_layers(files: HFFolder, fields: Mapping[str, Any], layers: int) -> list[Any]:
    """Returns a value for each layer that is equal for layers of the same kind: the names and shapes
    of its tensors, and its entries in lists of config.json.

    `fields`: config.json with the defaults that transformers adds.
    """
    tensors: list[set[Any]] = [set() for _ in range(layers)]
    for name in files.names:
        layer = layer_of(name)
        if layer is not None and layer < layers:
            start, _, rest = name.partition(f".{layer}.")
            tensors[layer].add((start, rest, files.shape_of(name)))
    lists = [value for name, value in fields.items() if _has_entries(name, value, layers)]
    return [
        (frozenset(tensors[layer]), tuple(json.dumps(each[layer]) for each in lists))
        for layer in range(layers)
    ]


def fewest_layers(kinds: Sequence[Any]) -> int:
    """Returns the smallest number of first layers that include every kind of layer. `kinds`: the
    kind of each layer.
    """
    firsts = {kind: kinds.index(kind) for kind in kinds}
    return min(len(kinds), max(FEWEST, max(firsts.values(), default=0) + 1))


def elements_with(files: HFFolder, kept: int) -> int:
    """Returns the number of elements of all tensors of a copy with `kept` layers."""
    return sum(math.prod(files.shape_of(name)) for name in _names(files, kept))


def bytes_with(files: HFFolder, kept: int) -> int:
    """Returns the number of bytes of all tensors of a copy with `kept` layers."""
    return sum(tensor.bytes for tensor in _planned(files, kept))


def _planned(files: HFFolder, kept: int) -> list[PlannedTensor]:
    return [
        PlannedTensor(name, files.dtype_of(name, integers=None), files.shape_of(name))
        for name in _names(files, kept)
    ]


def _names(files: HFFolder, kept: int) -> Iterator[str]:
    for name in files.names:
        layer = layer_of(name)
        if (layer is None or layer < kept) and not name.startswith("mtp."):
            yield name


def copy(
    source: Path, target: Path, layers: int, kept: int, *, progress: Callable[[int], object]
) -> None:
    """Writes the first `kept` of the `layers` layers of the folder `source` to the folder `target`,
    which must exist, as a model of so many layers with plain weights. Only their tensors are read.

    `progress`: called with the number of bytes written since the last call.
    """
    config = read_json_object(source / "config.json")
    files = open_quantised(source, config)
    planned = _planned(files, kept)
    shards = shards_of(planned, FILE_BYTES)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, _, shape in planned:
            whole = files.whole(name, shape, integers=None)
            progress(whole.nbytes)
            yield name, whole

    stream = tensors()
    for file, wanted in shards.items():
        write_shard(target / file, wanted, stream)
    write_index(target, shards)
    copy_companions(source, target, shards)
    short = shortened(read_json_object(target / "config.json"), layers, kept)
    (target / "config.json").write_text(json.dumps(short, indent=2) + "\n")


def needs_copy(config: Mapping[str, Any], layers: int, kept: int) -> bool:
    """Returns whether the folder itself can't be used: it has more layers, or quantised weights."""
    return kept < layers or is_quantised(config) or config.get(FIELD) is not None
