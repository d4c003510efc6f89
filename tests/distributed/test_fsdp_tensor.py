"""Decoders of transformers that two processes share by transformers' own plan, against transformers
in one, row by row.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftmega.backends.decoder.parameter_places import places_of, plans_of, read
from rftmega.backends.decoder.tensor_plan import partial_of, splits_of, styles_of
from rftmega.backends.fsdp.decoder_inputs import feed
from rftmega.backends.fsdp.sharding import materialise
from rftmega.backends.fsdp.tensor_parallel import share_layers
from rftmega.models.hf.hf_folder import HFFolder
from tests.chosen import chosen
from tests.ranks import run_ranks
from tests.tiny_decoders import FAMILIES, VOCABULARY, built_of, save_decoder
from tests.unit.backends.fsdp.test_families import (
    LENGTHS,
    TEMPERATURE,
    of_transformers,
    rows,
    worst,
)

WITHOUT_A_PLAN = {"gpt-oss", "codegen", "phimoe"}
REFUSED = {"gemma2"}
SHARED = sorted(FAMILIES.keys() - WITHOUT_A_PLAN - REFUSED)
FEW = ["gemma3", "mixtral", "phi-tied", "phi3", "qwen3-moe", "qwen3-next"]
EACH_FAMILY = pytest.mark.parametrize(
    "family",
    [
        family if family in FEW else pytest.param(family, marks=pytest.mark.ranks)
        for family in SHARED
    ],
)
FIRST_OF_SECOND = -(-VOCABULARY // 2)  # the first word of the second process


def shared_body(world: Any, folders: dict[str, Path]) -> dict[str, Any]:
    """Log-probs of all targets by family, and this process's gradients with its splits."""
    return {family: shared(folder) for family, folder in folders.items()}


def shared(folder: Path) -> Any:
    files = HFFolder(folder)
    built = built_of(folder)
    model = built.model
    parameters = dict(built.network.named_parameters())
    shapes = {name: tuple(parameters[own].shape) for own, name in built.names.items()}
    places = places_of(model, shapes, files, allowed={"lm_head.weight"})
    styles = styles_of(model, 2)
    splits = splits_of(model, styles, dist.get_rank(), 2)
    share_layers(built.network, model, styles, splits, dist.group.WORLD)
    materialise(built.network, model, torch.device("cpu"))
    built.network.eval()  # phimoe draws its experts while it learns
    named = {built.names[own]: each for own, each in built.network.named_parameters()}
    for name, parameter in named.items():
        held = parameter.detach()
        whole = (0, len(held))
        split = splits.get(name)
        plans = plans_of(name, places[name], whole, held.dtype, split=split, opens=False)
        read(files, [plan.of(held) for plan in plans])
    tokens, lengths = rows(FIRST_OF_SECOND)
    fed = feed(tokens, lengths, packed=built.unpacked is None, where=torch.device("cpu"))
    logp, _ = built.network(fed.arguments, fed.places, fed.targets, TEMPERATURE)
    weights = [torch.arange(1.0, length) for length in LENGTHS]
    (logp * torch.cat(weights)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in named.items()}
    for name in partial_of(model, styles):
        dist.all_reduce(gradients[name])
    return logp.detach(), gradients, splits


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return {
        family: save_decoder(tmp_path_factory.mktemp("model"), family)
        for family in chosen(request, "family") or FEW
    }


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> list[dict[str, Any]]:
    return run_ranks(2, shared_body, folders)


@EACH_FAMILY
def test_two_processes_give_transformers_own_log_probs_and_gradients(
    family: str, folders: dict[str, Path], found: list[dict[str, Any]]
) -> None:
    wanted, gradients = of_transformers(folders[family], FIRST_OF_SECOND)
    for logp, own, splits in (each[family] for each in found):
        torch.testing.assert_close(logp, torch.cat(wanted), rtol=0, atol=1e-5)
        shares = {}
        for name, whole in gradients.items():
            shares[name] = whole
            if name in splits:
                dim, slices = splits[name].dim, splits[name].slices
                pieces = [whole.narrow(dim, start, stop - start) for start, stop in slices]
                shares[name] = torch.cat(pieces, dim)
        assert worst(own, shares) < 1e-5


@EACH_FAMILY
def test_every_matrix_of_a_layer_is_shared(family: str, found: list[dict[str, Any]]) -> None:
    _, gradients, splits = found[0][family]
    matrices = {name for name, each in gradients.items() if ".layers." in name and each.dim() > 1}
    # routers and what a linear attention mixes tokens with are whole
    whole = {name for name in matrices - splits.keys() if not name.endswith("gate.weight")}
    assert family == "qwen3-next" or not whole, whole
