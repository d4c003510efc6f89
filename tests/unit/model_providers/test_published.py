"""config.json of published models, as their makers wrote it: read without complaint, and of the
published size.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rftmega.backends.decoder import meta_decoder
from rftmega.backends.decoder.describe import read_config
from rftmega.converters import instances, table
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.transformers_decoders import on_meta

COMMON: dict[str, Any] = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
                          "initializer_range": 0.02, "transformers_version": "4.44.0", "torch_dtype": "bfloat16",
                          "use_cache": True, "rms_norm_eps": 1e-6}  # fmt: skip


class Published(NamedTuple):
    """A line of tests/corpus/models.jsonl: the fields of a config.json that matter, and the published
    number of parameters; `exact`: to the last one, else within 1 %. `refused`: backend -> words of
    the message with which it refuses the model.
    """

    name: str
    parameters: int
    exact: bool
    refused: dict[str, str]
    config: dict[str, Any]


CORPUS = [
    Published(**json.loads(line))
    for line in (Path(__file__).parents[2] / "corpus/models.jsonl").read_text().splitlines()
]
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    each.name: (each.parameters, each.config) for each in CORPUS if each.exact
}
WITHIN = 0.01


@pytest.mark.parametrize(
    ("row", "backend"),
    [
        pytest.param(
            row,
            backend,
            id=f"{row.name}-{backend}",
            # transformers' classes are built: where Megatron's description is right, once is enough
            marks=[pytest.mark.ranks] if backend == "fsdp" and not row.refused else [],
        )
        for row in CORPUS
        for backend in ("megatron", "fsdp")
    ],
)
def test_a_model_of_the_corpus_has_its_published_size_or_is_refused_by_name(
    row: Published, backend: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMMON | row.config))
    if said := row.refused.get(backend):
        with pytest.raises(CheckpointError, match=re.escape(said)):
            size_of(tmp_path, backend)
        return
    bound = 0 if row.exact else WITHIN
    assert size_of(tmp_path, backend) == pytest.approx(row.parameters, rel=bound)


def size_of(folder: Path, backend: str) -> int:
    if backend == "megatron":
        return describe(read_hf_config(folder)).parameters
    return meta_decoder.describe(on_meta(read_config(folder), "eager")).parameters


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_config_is_understood_and_gives_the_published_number_of_parameters(
    name: str,
) -> None:
    parameters, fields = PUBLISHED[name]
    model = describe(COMMON | fields)
    assert model.parameters == parameters
    experts = model.experts.number if model.experts else 0
    by_table = 0
    for rule, _, _ in instances(table(COMMON | fields), layers=model.layers, experts=experts):
        # a buffer in transformers
        if rule.exported and not rule.megatron[0].endswith("expert_bias"):
            by_table += sum(math.prod(tensor.shape) for tensor in rule.hf)
    assert by_table == parameters
