"""ReferenceLogProbs: log-probs of given responses under the starting policy, computed once and kept
in a file.
"""

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rftmega.config import RunConfig
from rftmega.core.types import Preferences
from rftmega.data.preference import Preference, preference_rows
from rftmega.data.sampler import PromptOrder
from rftmega.data.supervised import Example, rows_of
from rftmega.run.placement.backend import TrainablePolicy
from rftmega.runtime.parallel.process_group import World

log = logging.getLogger(__name__)
FILE = "reference_log_probs.safetensors"
CHUNK = 512  # responses that are scored at once
OFTEN = 60.0  # seconds between two reports of the progress
Sums = dict[bytes, float]


class ReferenceLogProbs:
    """ReferenceLogProbs holds the sum of the log-probs of each response's tokens under the
    reference: the starting policy, or with adapters the base model.

    The sums are kept in the file `FILE` of the run's output, by the checksum of each response with
    its prompt and images. A resumed run reads them. If the model or an option of its numbers has
    changed, or data are new, the missing sums are computed.
    """

    def __init__(self, config: RunConfig, model: TrainablePolicy, world: World):
        """Reads the stored sums if the same reference computed them. Every process must create the
        object, before training.
        """
        self.model, self.world = model, world
        self.path = Path(config.trainer.output) / FILE
        self.made_by = made_by(config, model)
        said = [read(self.path, self.made_by) if world.is_main else {}]
        if world.size > 1:
            dist.broadcast_object_list(said, src=0)
        self.sums: Sums = said[0]

    def __call__(self, example: Example) -> float:
        """Returns the log-prob of the example's response, which `score` has computed."""
        return self.sums[checksum_of(example)]

    def score(self, examples: Iterable[Example]) -> None:
        """Computes the sums of the responses that have none yet, on all processes, and writes the
        file.
        """
        missing = {checksum_of(example): example for example in examples}
        for known in self.sums.keys() & missing.keys():
            del missing[known]
        names, waiting = list(missing), list(missing.values())
        begin = told = time.monotonic()
        for first in range(0, len(waiting), CHUNK):
            part = slice(first, first + CHUNK)
            self.sums |= zip(names[part], self._scored(waiting[part]), strict=True)
            done = min(first + CHUNK, len(waiting))
            if time.monotonic() - told > OFTEN or done == len(waiting):
                told = time.monotonic()
                self._report(done, len(waiting), told - begin)

    def _scored(self, examples: Sequence[Example]) -> list[float]:
        rows = rows_of(examples)
        logp = self.model.starting_log_probs(rows).logp
        found: list[float] = torch.where(rows.mask, logp, 0.0).double().sum(-1).tolist()
        return found

    def _report(self, done: int, number: int, seconds: float) -> None:
        if self.world.is_main:
            log.info("reference log-probs: %d of %d responses, %.0f s", done, number, seconds)
            write(self.path, self.made_by, self.sums)


def collate_of(
    config: RunConfig,
    policy: TrainablePolicy,
    order: PromptOrder[Preference],
    held_out: Mapping[str, Sequence[Preference]],
    world: World,
) -> Callable[[Sequence[Preference]], Preferences]:
    """Returns the function that makes rows of preference data. If the loss reads the reference, it
    first scores all responses of `order` and `held_out`; every process calls it, before training.
    """
    if not config.algorithm.scores_reference_once:
        return preference_rows
    reference = ReferenceLogProbs(config, policy, world)
    examples = itertools.chain(order.examples, *held_out.values())
    reference.score(part for each in examples for part in (*each.responses, *each.mismatched))
    return partial(preference_rows, reference=reference)


def checksum_of(example: Example) -> bytes:
    """Returns a checksum of the prompt's and the response's tokens and media."""
    tokens = (example.prompt_ids, example.response_ids)
    found = hashlib.blake2b(digest_size=16)
    for ids in tokens:
        found.update(len(ids).to_bytes(8, "little") + np.array(ids, np.int64).tobytes())
    for image in example.images:
        _, *described = image.state()  # all but the content, of which the digest is one
        found.update(repr(described).encode())
    return found.digest()


def made_by(config: RunConfig, model: TrainablePolicy) -> dict[str, str]:
    """Returns the values on which the reference's numbers depend: the checksum of its weights, and
    the precision.
    """
    precision = {"dtype": str(model.dtype), "fp8": config.model.fp8}
    return {"weights": f"{model.starting_sum:x}", **precision}


def write(path: Path, made: dict[str, str], sums: Sums) -> None:
    """Writes the file, so that an interrupted write leaves the earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checksums = np.frombuffer(b"".join(sums), np.uint8).reshape(len(sums), -1)
    tensors = {
        "responses": torch.from_numpy(checksums.copy()),
        "sums": torch.tensor(list(sums.values()), dtype=torch.float64),
    }
    beside = path.with_suffix(".tmp")
    save_file(tensors, beside, metadata={"made_by": json.dumps(made, sort_keys=True)})
    beside.replace(path)


def read(path: Path, made: dict[str, str]) -> Sums:
    """Returns checksum of a response -> its stored sum; {} if the file is missing, broken, or from
    another model.
    """
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            if json.loads((file.metadata() or {}).get("made_by", "null")) != made:
                log.warning("%s: another model or precision made it, so it is replaced", path)
                return {}
            responses, sums = file.get_tensor("responses"), file.get_tensor("sums")
    except (SafetensorError, OSError, ValueError) as error:
        log.warning("%s can't be read, so it is computed again: %s", path, error)
        return {}
    return dict(zip(map(bytes, responses.numpy()), sums.tolist(), strict=True))
