"""A decoder that FSDP2 can't build is refused before processes start, in the words of the build."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rftmega.backends.fsdp.buildable import refuse_unbuildable
from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.run.model_check import weights
from rftmega.run.preflight import preflight
from tests.families import CannotBuildError, causal_types, config_of_sweep, save_tiny_of, silence
from tests.family_configs import tiny_config
from tests.ranks import run_ranks

FORMATS = {"published": True, "transformers": False}
# bidirectional; a bias tied elsewhere; another head than the tied one; tensors that are divided; a
# table of experts
UNLIKE = ("bert", "bert-generation", "bigbird_pegasus", "hrm_text", "deepseek_v4")
NAME = "model.safetensors"
ACCEPTED = "backend=fsdp accepts this config.json"


def built(world: Any, folders: Sequence[Path], rank: int = 0) -> list[str]:
    """What the build says of each folder, with adapters of this rank; "": nothing."""
    from rftmega.core.errors import RFTMegaError
    from rftmega.run.train import built_backend

    silence()
    found = []
    for folder in folders:
        config = config_of_sweep(folder)
        config.model.lora.rank = rank
        try:
            built_backend(config).policy(config)
            found.append("")
        except RFTMegaError as error:
            found.append(str(error))
        gc.collect()
    return found


def before(folder: Path, rank: int = 0) -> str:
    config = config_of_sweep(folder)
    config.model.lora.rank = rank
    try:
        preflight(config, 1)
    except ConfigError as error:
        return str(error)
    return ""


def statements(folder: Path) -> list[str]:
    """What `rftmega check` says of the folder on FSDP2, and Megatron's refusal of a type of FSDP2."""
    read = weights.read(folder, ["fsdp"])
    said = [*read.refusals.values(), *weights.usable(folder, read).values()]
    found = ["; ".join(each for each in said if each)]

    def refused() -> str:
        try:
            refuse_unbuildable(folder)
        except CheckpointError as error:
            return str(error)
        return ""

    try:
        describe(read_hf_config(folder), refused=refused)
    except CheckpointError as error:
        if "backend=fsdp" in str(error):
            found.append("" if ACCEPTED in str(error) else str(error))
    return found


def told(text: str, folder: Path) -> str:
    """Returns a message without the option that names the folder, on one line."""
    return " ".join(text.replace(f"model.path={folder}: ", "").split()).removeprefix(f"{folder}: ")


@pytest.mark.parametrize("types", ["few", pytest.param("all", marks=pytest.mark.ranks)])
def test_what_the_build_refuses_is_refused_before_in_its_words_and_all_else_is_built(
    types: str, tmp_path: Path
) -> None:
    folders = []
    for kind in UNLIKE if types == "few" else causal_types():
        for name, original in FORMATS.items():
            folder = tmp_path / kind / name
            try:
                save_tiny_of(kind, folder, original=original)
            except CannotBuildError:
                continue
            folders.append(folder)
    (said,) = run_ranks(1, built, folders, timeout=900)
    wrong = []
    for folder, late in zip(folders, said, strict=True):
        early, others = before(folder), statements(folder)
        if bool(late) != bool(early) or told(late, folder) not in told(early, folder):
            wrong.append((str(folder.relative_to(tmp_path)), "preflight", late, early))
        wrong += [
            (str(folder.relative_to(tmp_path)), "statement", late, each)
            for each in others
            if bool(each) != bool(late)
        ]
    assert wrong == []
    assert any(said) and not all(said)


def spoilt(folder: Path, change: Any) -> Path:
    held = load_file(folder / NAME)
    change(held)
    save_file(held, folder / NAME, metadata={"format": "pt"})
    return folder


DAMAGES: dict[str, Any] = {
    "a tensor is missing": lambda held: held.pop("model.norm.weight"),
    "a tensor is left over": lambda held: held.update({"model.extra.weight": torch.ones(3)}),
    "another shape": lambda held: held.update({"model.norm.weight": torch.ones(3)}),
    "whole numbers": lambda held: held.update(
        {"model.norm.weight": held["model.norm.weight"].long()}
    ),
    "another head": lambda held: held.update(
        {"lm_head.weight": held["model.embed_tokens.weight"] + 1}
    ),
}


def test_weights_that_the_build_refuses_are_refused_before(tmp_path: Path) -> None:
    folders = []
    for number, change in enumerate(DAMAGES.values()):
        folders.append(tmp_path / str(number))
        save_tiny_of("gemma2", folders[-1])  # with a tied embedding
        spoilt(folders[-1], change)
    (said,) = run_ranks(1, built, folders)
    assert all(said)
    for folder, late in zip(folders, said, strict=True):
        assert late in before(folder)


def test_adapters_on_parts_of_a_tensor_are_refused_before(tmp_path: Path) -> None:
    for name, original in FORMATS.items():
        save_tiny_of("hrm_text", tmp_path / name, original=original)
    folders = [tmp_path / name for name in FORMATS]
    ((divided, whole),) = run_ranks(1, built, folders, 2)
    assert "q_proj.weight is a part of model.L_module.layers.0.attn.gqkv_proj.weight" in divided
    assert divided in before(folders[0], 2)
    assert (whole, before(folders[1], 2)) == ("", "")


def test_a_tensor_that_nothing_makes_anew_is_refused_before(tmp_path: Path) -> None:
    """Sinusoidal positions of TrOCR, with which transformers' own model of the folder fails, too."""
    config = tiny_config("trocr")
    config.use_learned_position_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ((late,),) = run_ranks(1, built, [tmp_path])
    assert "keeps 'weights' as neither parameter nor buffer" in late
    assert late in before(tmp_path)
