"""The comparison of a model's cache with its pass over the whole sequence names what differs."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.rollout.engines.transformers import TransformersEngine

KINDS = {
    "right": (False, False, ""),
    "a wrong cache": (True, False, "cache gives other logits than a pass over the whole sequence"),
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
    with caplog.at_level(logging.WARNING):
        assert engine._has_right_cache() == (not said)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)
