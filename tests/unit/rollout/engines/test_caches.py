"""The comparison of a model's cache with its pass over the whole sequence names what differs."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.config import RolloutConfig
from rftmega.core.types import Prompt, Sampling
from rftmega.model_providers.transformers_decoders import SEEING, refusal
from rftmega.rollout.engines.transformers import TransformersEngine
from tests.families import TABLE
from tests.family_configs import tiny_config

WINDOW = 12
FEW = ("moshi", "gemma3_text")
WITH_WINDOWS = [
    kind if kind in FEW else pytest.param(kind, marks=pytest.mark.ranks)
    for kind in (
        row["type"]
        for row in json.loads(TABLE.read_text())["rows"]
        if row["verdict"] == "ok" and row["type"] not in SEEING
    )
]
KINDS = {
    "right": (False, False, ""),
    "a wrong cache": (
        True,
        False,
        "cache of this model gives other logits than a pass over the whole sequence",
    ),
    "the length": (True, True, "without it, too, tokens have other logits in a longer sequence"),
}


class Model:
    """Logits that depend on a cache's use, or on the number of tokens of a pass."""

    def __init__(self, *, cached: bool, length: bool):
        self.cached, self.length = cached, length

    def __call__(self, ids: Tensor, *, use_cache: bool, **given: Any) -> Any:
        logits = torch.nn.functional.one_hot(ids, 20).float()
        if use_cache and self.cached:
            logits = logits + torch.arange(20)
        if self.length:
            logits = logits * ids.shape[1]
        return SimpleNamespace(logits=logits, past_key_values=None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_logits_depend_on_the_length_has_no_wrong_cache(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cached, length, said = KINDS[kind]
    engine = object.__new__(TransformersEngine)
    engine.model = Model(cached=cached, length=length)  # type: ignore[assignment]
    engine.where, engine._caches = torch.device("cpu"), None
    engine._has_windows = False
    with caplog.at_level(logging.WARNING):
        assert engine._has_right_cache() == (not said)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def with_short_windows(kind: str) -> Any:
    """Returns the config of a tiny model whose windows, and chunks of attention, have WINDOW tokens."""
    config = tiny_config(kind)
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if isinstance(value, int) and not isinstance(value, bool) and "window" in name:
            setattr(text, name, WINDOW)
    return config


@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_completions_longer_than_a_window_are_sampled_from_the_model(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = with_short_windows(kind)
    config.save_pretrained(tmp_path)
    if refusal(json.loads(config.to_json_string())):
        return
    options = RolloutConfig(max_prompt_tokens=8, max_response_tokens=24)
    engine = TransformersEngine(tmp_path, options, stop_ids=[], where=torch.device("cpu"))
    for parameter in engine.model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    engine.version = 0
    (found,) = engine.generate([Prompt((5, 9, 17))], seeds=[1], sampling=Sampling(1.0))
    row = torch.tensor([[5, 9, 17, *found.token_ids]])
    with torch.no_grad():
        logp = engine.model(row, use_cache=False).logits[0].log_softmax(-1)
    wanted = logp[2:-1].gather(-1, row[0, 3:, None])[:, 0]
    assert len(found.token_ids) == 24
    assert (wanted - torch.tensor(found.logprobs)).abs().max() < 1e-4
