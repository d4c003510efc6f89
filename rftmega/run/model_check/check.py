"""Runs all checks of a model folder, one after the other."""

import gc
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftmega.config.capabilities import BACKENDS
from rftmega.core.errors import RFTMegaError
from rftmega.core.json_files import read_json_object
from rftmega.model_providers.description import ModelDescription
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.run.conversion.progress_bar import progress_bar
from rftmega.run.model_check import reference, truncated, weights
from rftmega.run.model_check.backends import (
    STAGES,
    TOLERANCE,
    Compared,
    of_backend,
    row_of,
    rows_for,
)
from rftmega.run.model_check.findings import Finding, ok, raised, skipped
from rftmega.run.model_check.text import of_text
from rftmega.runtime.device.cpu import CPU

WHOLE = 1_000_000_000  # parameters up to which a model is checked with all its layers
COPIES = 4  # float32 numbers per parameter: weights, gradients and what is computed
SHARE = 0.8  # of the free memory that may be used
BYTES = 4
log = logging.getLogger(__name__)


@dataclass
class ModelCheck:
    """ModelCheck holds the choices for a check, and its findings so far."""

    folder: Path
    backends: Sequence[str] = tuple(BACKENDS)
    asked: Sequence[str] = ()  # the backends that the user named
    layers: int | None = None  # None: as many as fit, few of a large model
    tokens: int = 64  # of the completion
    ignored: Sequence[str] = ()  # fields of config.json
    kept: int = 0  # layers that were checked
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> list[Finding]:
        """Runs all checks. Returns the findings in the order of the checks."""
        with reference.quiet():
            self._run()
        return self.findings

    def _run(self) -> None:
        found = weights.read(self.folder, self.backends)
        self.findings += weights.of_config(self.folder, found, self.asked)
        vocabulary = next((each.vocabulary for each in found.descriptions.values()), None)
        log.info("tokenizer and chat template ...")
        of_tokens, tokenizer = of_text(self.folder, vocabulary)
        log.info("headers of the weights ...")
        of_weights = weights.of_files(self.folder, found)
        self.findings += [*of_weights, *of_tokens]
        if not found.descriptions or any(each.state == "problem" for each in of_weights):
            self._skip_numbers("no model can be built, see above")
            return
        with tempfile.TemporaryDirectory(prefix="rftmega-check-") as scratch:
            try:
                self.findings += self._numbers(found, tokenizer, Path(scratch))
            except Exception as error:  # foreign code, given a user's folder
                self.findings.append(raised("logits", error))

    def _skip_numbers(self, why: str) -> None:
        names = ("logits", *STAGES, "generation")
        self.findings += [skipped(name, why) for name in names]

    def _numbers(
        self, found: weights.ReadConfig, tokenizer: Any, scratch: Path
    ) -> Iterator[Finding]:
        """Yields the findings of all checks that need the built model."""
        config = read_json_object(self.folder / "config.json")
        files = open_quantised(self.folder, config)
        layers = truncated.layers_in(config, files.names)
        kinds = truncated.kinds_of_layers(files, _with_defaults(self.folder, config), layers)
        free = CPU().room()
        self.kept = self._chosen(files, layers, truncated.fewest_layers(kinds), free)
        if self.kept < layers:
            yield ok("layers", f"the first {self.kept} of {layers} are checked, see --layers")
        if not _fits(files, self.kept, free):
            needed = COPIES * BYTES * truncated.elements_with(files, self.kept)
            said = f"{self.kept} of {layers} layers take about {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"
            yield from (skipped(each, said) for each in ("logits", *STAGES, "generation"))
            return
        folder = self.folder
        if truncated.needs_copy(config, layers, self.kept):
            folder = scratch / "model"
            folder.mkdir()
            size = truncated.bytes_with(files, self.kept)
            with progress_bar(self.folder, f"copy of {self.kept} layers", total=size) as bar:
                truncated.copy(self.folder, folder, layers, self.kept, progress=bar.update)
        model = next(iter(found.descriptions.values()))
        given = yield from self._reference(folder, tokenizer, model, whole=self.kept == layers)
        read = weights.read(folder, list(found.descriptions))
        refused = {**read.refusals, **weights.usable(folder, read)}
        for name in found.descriptions:
            if why := refused[name]:
                copied = "" if folder == self.folder else f"the copy of {self.kept} layers: "
                yield from (_of(name, skipped(each, copied + why)) for each in STAGES)
                continue
            log.info("backend=%s ...", name)
            place = scratch / name
            place.mkdir()
            for each in of_backend(name, folder, place, given, self.ignored):
                yield _of(name, each)
            gc.collect()

    def _chosen(self, files: HFFolder, layers: int, fewest: int, free: int) -> int:
        """Returns the number of layers to check. `fewest`: the smallest number of first layers that
        include every kind of layer; `free`: bytes of free memory.
        """
        if self.layers is not None:
            return min(self.layers, layers)
        small = truncated.elements_with(files, layers) <= WHOLE
        return layers if small and _fits(files, layers, free) else fewest

    def _reference(
        self, folder: Path, tokenizer: Any, model: ModelDescription, *, whole: bool
    ) -> Any:
        """Yields the findings about transformers' model of a folder. Returns its logits of random
        rows. `whole`: the folder has all layers of the model.
        """
        fields = weights.config_of(folder)
        rows = rows_for(fields, model.vocabulary, model.max_positions)
        if reference.class_of(folder) is None:
            yield skipped("logits", "transformers has no such model")
            return Compared(rows, None)
        log.info("transformers ...")
        try:
            built, _ = reference.loaded(folder)
        except Exception as error:  # of each class's own code, given a user's folder
            yield raised("logits", error)
            return Compared(rows, None)
        tokens = [row_of(rows, each) for each in range(len(rows))]
        logits = [reference.logits_of(built, each) for each in tokens]
        yield from reference.of_logits(logits, fields)
        difference = reference.uneven(built, tokens, logits)
        if difference > TOLERANCE:
            yield reference.of_uneven(difference)
        yield from self._sampled(built, tokenizer, model.max_positions, whole=whole)
        return Compared(rows, logits, difference)

    def _sampled(
        self, model: Any, tokenizer: Any, positions: int, *, whole: bool
    ) -> Iterator[Finding]:
        """Yields the findings about the model's predictions and completions of text. They are
        skipped for a copy of the first layers, which can't write text.
        """
        if tokenizer is None or not whole:
            why = "no tokenizer" if tokenizer is None else "a copy of few layers writes no text"
            yield skipped("generation", why)
            return
        try:
            yield reference.of_prediction(model, tokenizer)
            yield reference.of_generation(model, tokenizer, self.tokens, positions=positions)
        except RFTMegaError:
            yield skipped("generation", "the prompt can't be rendered")
        except Exception as error:  # foreign code, given a user's folder
            yield raised("generation", error)


def _fits(files: HFFolder, layers: int, free: int) -> bool:
    """Returns whether a model with so many layers can be checked in `free` bytes of memory."""
    return COPIES * BYTES * truncated.elements_with(files, layers) <= SHARE * free


def _of(backend: str, finding: Finding) -> Finding:
    return finding._replace(check=f"{finding.check}, {backend}")


def _with_defaults(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json, flattened, with the fields that transformers adds to it if it can."""
    from transformers import AutoConfig

    found = weights.config_of(folder)
    try:
        read = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
        return {
            **read.to_dict(),
            **{key: value for key, value in found.items() if value is not None},
        }
    except Exception:  # of each class's own code; Megatron's families need no class
        return found
