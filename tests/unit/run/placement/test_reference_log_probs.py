"""The reference scores each response once, whoever asks for it later."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import RunConfig
from rftmega.core.media_positions import PlacedImage
from rftmega.core.types import Rows, TokenStats
from rftmega.data.supervised import Example
from rftmega.run.placement import reference_log_probs
from rftmega.run.placement.reference_log_probs import FILE, ReferenceLogProbs, checksum_of
from rftmega.runtime.parallel.process_group import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
EXAMPLES = [
    Example((5, 6), (7, 8, 9)),
    Example((5,), (6, 7, 8, 9)),  # the same tokens, of which more are the response
    Example((1, 2, 3), (4,)),
]


class Policy:
    """The log-prob of a token is minus a hundredth of it."""

    dtype = torch.float32

    def __init__(self, starting_sum: int = 77):
        self.starting_sum = starting_sum
        self.scored: list[int] = []

    def starting_log_probs(self, rows: Rows) -> TokenStats:
        self.scored.append(len(rows))
        return TokenStats(-rows.tokens[:, 1:] / 100, None)


def of(
    folder: Path, policy: Any, examples: Sequence[Example], dtype: str = "float32"
) -> list[float]:
    config = RunConfig()
    config.trainer.output = str(folder)
    policy.dtype = getattr(torch, dtype)
    reference = ReferenceLogProbs(config, policy, ALONE)
    reference.score(examples)
    return [reference(example) for example in examples]


WANTED = [-0.24, -0.30, -0.04]


def test_the_sums_of_responses_are_read_from_the_file(tmp_path: Path) -> None:
    first, second = Policy(), Policy()
    assert of(tmp_path, first, [*EXAMPLES, EXAMPLES[0]]) == pytest.approx([*WANTED, WANTED[0]])
    assert first.scored == [3], "a response that occurs twice is scored once"
    assert of(tmp_path, second, EXAMPLES[::-1]) == pytest.approx(WANTED[::-1])
    assert second.scored == []


def test_new_responses_alone_are_scored(tmp_path: Path) -> None:
    of(tmp_path, Policy(), EXAMPLES[:1])
    policy = Policy()
    assert of(tmp_path, policy, EXAMPLES) == pytest.approx(WANTED)
    assert policy.scored == [2]
    last = Policy()
    of(tmp_path, last, EXAMPLES)
    assert last.scored == []


@pytest.mark.parametrize("change", ["weights", "dtype", "broken"])
def test_the_file_of_another_model_is_replaced(change: str, tmp_path: Path) -> None:
    of(tmp_path, Policy(), EXAMPLES)
    if change == "broken":
        (tmp_path / FILE).write_bytes(b"half a fi")
    policy = Policy(78 if change == "weights" else 77)
    dtype = "bfloat16" if change == "dtype" else "float32"
    assert of(tmp_path, policy, EXAMPLES, dtype) == pytest.approx(WANTED)
    assert policy.scored == [3]


def test_an_interrupted_pass_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_log_probs, "CHUNK", 1)
    monkeypatch.setattr(reference_log_probs, "OFTEN", -1.0)
    policy = Policy()
    stopped = iter([False, False, True])
    scored = policy.starting_log_probs

    def once_more(rows: Rows) -> TokenStats:
        if next(stopped):
            raise KeyboardInterrupt
        return scored(rows)

    policy.starting_log_probs = once_more  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        of(tmp_path, policy, EXAMPLES)
    last = Policy()
    assert of(tmp_path, last, EXAMPLES) == pytest.approx(WANTED)
    assert last.scored == [1]


def test_other_images_make_another_response(tmp_path: Path) -> None:
    def seen(digest: str, start: int) -> Example:
        return Example((5, 6), (7,), images=(PlacedImage("x.png", digest, (1, 2, 2), start, 1),))

    found = {checksum_of(each) for each in (seen("a", 0), seen("b", 0), seen("a", 1), *EXAMPLES)}
    assert len(found) == 6
    assert checksum_of(seen("a", 0)) == checksum_of(seen("a", 0))
