"""A folder of adapters as PEFT writes and reads it: adapter_model.safetensors, adapter_config.json."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rftmega.converters.adapters import DOWN, UP
from rftmega.errors import CheckpointError
from rftmega.hf_folders.hf_folder import HFFolder, PlannedTensor, write_shard
from rftmega.json_files import read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the name of a module of transformers' model
# that change what an adapter is, with what they are where they change nothing
UNKNOWN: dict[str, Any] = {
    **{"use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "lora_bias": False},
    **{"bias": "none", "modules_to_save": None, "layers_to_transform": None},
    **{"rank_pattern": {}, "alpha_pattern": {}},
}


def target_of(name: str) -> str:
    """Returns the module that a tensor of an adapter is on, such as q_proj."""
    return name.removesuffix(DOWN).removesuffix(UP).rsplit(".", 1)[1]


class PEFTFolder:
    """PEFTFolder reads the adapters of one folder."""

    def __init__(self, folder: str | Path, *, rank: int, alpha: float, targets: Iterable[str]):
        """Raises CheckpointError where it holds no such adapters."""
        self.folder = Path(folder)
        said = read_json_object(self.folder / CONFIG)
        found = [
            f"{name}={said.get(name)} is not {wanted}, which model.lora.{option} says"
            for name, option, wanted in (("r", "rank", rank), ("lora_alpha", "alpha", alpha))
            if said.get(name) != wanted
        ]
        modules = said.get("target_modules")
        wanted = sorted(targets)
        if (
            not isinstance(modules, list)
            or sorted({n.rsplit(".", 1)[-1] for n in modules}) != wanted
        ):
            found.append(
                f"target_modules={modules} are not those of model.lora.targets, {', '.join(wanted)}"
            )
        if (kind := said.get("peft_type")) != "LORA":
            found.append(f"peft_type={kind} is not LORA")
        found += [
            f"{name}={said[name]} is not known here"
            for name, plain in UNKNOWN.items()
            if said.get(name, plain) not in (plain, None)
        ]
        if found:
            raise CheckpointError(f"model.lora.path: {self.folder / CONFIG}: {'; '.join(found)}.")
        self._files = HFFolder(self.folder)

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads a tensor, by its name without PEFT's prefix.

        Raises CheckpointError where it is missing or of another shape.
        """
        return self._files.whole(PREFIX + name, shape)


def write_pairs(
    folder: Path, planned: Sequence[PlannedTensor], tensors: Iterator[tuple[str, Tensor]]
) -> set[str]:
    """Writes the tensors of a stream, which are the `planned` ones in their order; returns the
    modules that they are on.

    Of a weight some of whose HF tensors have an adapter, the second matrix has zeros for the others:
    those are left out.
    """
    names = {each.name for each in planned}
    kept = {name for name in names if name.endswith(DOWN) or name.removesuffix(UP) + DOWN in names}
    coming = [each._replace(name=PREFIX + each.name) for each in planned if each.name in kept]
    stream = ((PREFIX + name, tensor) for name, tensor in tensors if name in kept)
    write_shard(folder / WEIGHTS, coming, stream)
    return {target_of(name) for name in kept}


def write_config(
    folder: Path, *, base: str, rank: int, alpha: float, dropout: float, targets: Iterable[str]
) -> None:
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        "inference_mode": True,
        **UNKNOWN,
    }
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
