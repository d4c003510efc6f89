"""Training checkpoints: all that a run goes on from, written beside the training; the latest is
always whole.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from rftmega.checkpoints import retention
from rftmega.checkpoints.background_writer import BackgroundWriter
from rftmega.checkpoints.code_versions import code_versions
from rftmega.checkpoints.inputs import changed_inputs
from rftmega.checkpoints.reader import read_manifest
from rftmega.checkpoints.snapshot import HostCopies
from rftmega.checkpoints.states import put_together, taken_apart
from rftmega.checkpoints.training import StoredModel, TrainingReader, write_rank, write_whole
from rftmega.config import RunConfig, changes, without_secrets
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import ShardBox
from rftmega.models.known_fields import without_strange_sections
from rftmega.runtime.parallel import collectives, seeds
from rftmega.runtime.parallel.watchdog import mark

log = logging.getLogger(__name__)


class TrainedModel(Protocol):
    """TrainedModel is all that checkpoints know of a model (`strategy.backend.Trainable`)."""

    def training_tensors(self) -> Iterable[ShardBox]:
        """Yields this process's boxes of weights, of their average, and of the optimizer's state."""

    def described(self) -> dict[str, Any]:
        """Returns what tells models apart, as JSON has it.

        That is "hf_config", "dtype" and "layout". A checkpoint of another layout can be resumed.
        With adapters also "adapters", and the checksum of the frozen weights, "base"; where a
        reference is kept that of its weights, "reference".
        """

    def counters(self) -> dict[str, int]:
        """Returns the optimizer's progress ("adam_steps", "schedule_steps") as this process sees
        it.
        """

    def restore(
        self, stored: StoredModel, *, strict: bool, optimizer: bool, schedule: bool
    ) -> None:
        """Takes back what `training_tensors` and `counters` gave; see `TrainingCheckpoints.load`."""

    def random_state(self) -> dict[str, Any]:
        """Returns the states of the random streams that depend on the layout."""

    def set_random_state(self, state: dict[str, Any]) -> None: ...


class TrainingCheckpoints:
    """Saves and loads `models` (name -> what is trained) in folders of `folder`.

    Every process calls each method alike.
    """

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, TrainedModel],
        config: RunConfig,
        *,
        keep: int = 3,
        keep_mb: float = float("inf"),
        asynchronous: bool = False,
        warn: bool = False,
        export: Callable[[Path], None] | None = None,
    ):
        """Keeps at most `keep` checkpoints of `keep_mb` (10^6 bytes) together. What can't be
        written is a warning with `warn`, else CheckpointError, when the next is saved or waited
        for. `export` writes a Hugging Face folder beside the state, or raises CheckpointError on
        all processes.
        """
        self.folder, self.models, self.config = folder, models, config
        self.keep, self.keep_mb = keep, keep_mb
        self.asynchronous, self.warn, self.export = asynchronous, warn, export
        # what runs: files may be others by the time of a save
        self._code = code_versions() if dist.get_rank() == 0 else {}
        # what the run has read, on the first process: `launch.input_files`
        self.inputs: dict[str, dict[str, Any]] = {}
        self._copies = HostCopies()
        self._writing: tuple[str, BackgroundWriter] | None = None

    def save(
        self, state: dict[str, Any], *, step: int, tag: str | None = None, latest: bool = True
    ) -> None:
        """Writes folder/`tag` (or step_<step>). The one before is waited for; `latest`: becomes
        what a resume goes on from.

        `state` is as JSON has it, but for tensors, which nobody changes while they are written.
        """
        mark("save")
        self.wait()
        name = tag or f"step_{step:06d}"
        draft = self.folder / (name + retention.DRAFT)
        if error := self._on_first(partial(retention.begin, self.folder, name)):
            self._failed(name, [error])
            return
        try:
            if self.export is not None:
                self.export(draft / "hf")
        except CheckpointError as raised:  # on all processes
            self._failed(name, [str(raised)])
            return
        said, tensors = taken_apart(state)
        about = self._about(said, step)
        snapshot = self._copies.take(
            (name, box) for name, model in self.models.items() for box in model.training_tensors()
        )
        part = partial(
            write_rank,
            draft,
            dist.get_rank(),
            snapshot,
            self._random(),
            tensors if dist.get_rank() == 0 else None,
        )
        whole = (
            partial(self._complete, draft, name, about, latest) if dist.get_rank() == 0 else None
        )
        self._writing = name, BackgroundWriter(part, whole)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is on the disk.

        Raises CheckpointError, or warns, where it can't be.
        """
        if self._writing is None:
            return
        name, writing = self._writing
        self._writing = None
        if errors := writing.wait():
            self._failed(name, errors)

    def leave(self) -> None:
        """Waits for the files of a save, where this process is the only one: another run may begin in
        it. Of several, each is about to end.
        """
        if self._writing is not None and dist.get_world_size() == 1:
            self._writing[1].wait()
            self._writing = None

    def load(
        self,
        folder: Path,
        *,
        strict: bool = True,
        optimizer: bool = True,
        schedule: bool = True,
        random: bool = True,
    ) -> dict[str, Any]:
        """Takes everything back from one checkpoint, under whatever layout; the `state` it was
        saved with.

        Without `strict`, weights that it lacks stay as they are. `random` streams go on only where
        the layout is the same. Raises CheckpointError, on every process, where it is another
        model's, of a newer format, or not as it was written; it names the one before.
        """
        state: dict[str, Any] = {}
        error = None
        try:
            reader = TrainingReader(folder)
            found = reader.manifest
            state = put_together(found["state"], reader.whole)
            for name, model in self.models.items():
                refuse_another(name, model, found, self.config)
                stored = StoredModel(reader, name)
                model.restore(stored, strict=strict, optimizer=optimizer, schedule=schedule)
            if random and self._same_layout(found):
                self._set_random(reader.random_of(dist.get_rank()))
        except CheckpointError as raised:
            error = str(raised)
        if errors := [each for each in collectives.gather_objects(error) if each]:
            before = retention.before(folder)
            offer = (
                f"The one before it is {before}: checkpoint.resume={before}."
                if before
                else "There is none before it."
            )
            raise CheckpointError(f"{errors[0]} {offer}")
        return state

    def resume(self) -> dict[str, Any] | None:
        """Loads the checkpoint that checkpoint.resume names and returns its `state`; None for a run
        that starts anew.
        """
        if (given := self._to_resume()) is None:
            return None
        state = self.load(given)
        if dist.get_rank() == 0:
            self._say_resumed(given)
        return state

    def _to_resume(self) -> Path | None:
        """Returns the checkpoint to resume, as the first process sees it: another host may not see
        a new one yet.
        """
        found, error = None, ""
        if dist.get_rank() == 0:
            try:
                found = self._chosen()
            except CheckpointError as raised:
                error = str(raised)
        found, error = collectives.gather_objects((found, error))[0]
        if error:
            raise CheckpointError(error)
        return found

    def _chosen(self) -> Path | None:
        chosen = self.config.checkpoint.resume
        if chosen == "none":
            return None
        if chosen == "auto" and retention.pointed(self.folder) is None:
            if whole := retention.newest(self.folder):
                log.warning(
                    "%s has no file named latest: a new run. To go on: checkpoint.resume=%s.",
                    self.folder,
                    whole,
                )
            return None
        folder = self.folder if chosen == "auto" else Path(chosen)
        return retention.find(folder, None) if (folder / retention.LATEST).is_file() else folder

    def _say_resumed(self, given: Path) -> None:
        """Logs it, and what is otherwise than in the run that saved it."""
        log.info("resumed from %s", given)
        before, now = (
            read_manifest(given),
            {"config": without_secrets(self.config), "code": self._code},
        )
        told = changes(before["config"], now["config"])
        told += changed_inputs(before.get("inputs", {}), self.inputs)
        for change in told + changes(before["code"], now["code"]):
            log.info("  %s", change)

    def _complete(
        self,
        draft: Path,
        name: str,
        about: dict[str, Any],
        latest: bool,
        given_up: Callable[[], bool],
    ) -> None:
        """Completes a checkpoint that all ranks have written: manifest, name, pointer, and only
        then older ones go.
        """
        if not write_whole(draft, dist.get_world_size(), about, given_up=given_up):
            return
        name = retention.settle(draft, self.folder / name).name
        if latest:
            retention.point_to(self.folder, name)
        retention.rotate(self.folder, max_num=self.keep, max_mem=self.keep_mb, saved=name)

    def _failed(self, name: str, errors: list[str]) -> None:
        draft = self.folder / (name + retention.DRAFT)
        if dist.get_rank() == 0 and retention.is_draft(draft):
            shutil.rmtree(draft, ignore_errors=True)
        named = retention.pointed(self.folder)
        latest = f"The latest is still {named}." if named else "There is none yet."
        text = (
            f"Checkpoint {self.folder / name} can't be written: {'; '.join(errors)}. {latest} Make room or rights there, or "
            "choose another checkpoint.folder; checkpoint.on_failure=warn would train on."
        )
        if not self.warn:
            raise CheckpointError(text)
        if dist.get_rank() == 0:
            log.warning("%s", text)

    def _on_first(self, work: Callable[[], object]) -> str | None:
        """Does the work on the first process; on all of them, what went wrong."""
        error = None
        if dist.get_rank() == 0:
            try:
                work()
            except OSError as raised:
                error = f"{type(raised).__name__}: {raised}"
        return collectives.gather_objects(error)[0]

    def _about(self, state: dict[str, Any], step: int) -> dict[str, Any]:
        return {
            "step": step,
            "state": state,
            "config": without_secrets(self.config),
            "code": self._code,
            "inputs": self.inputs,
            "ranks_written": dist.get_world_size(),
            "models": {name: self._described(model) for name, model in self.models.items()},
        }

    def _described(self, model: TrainedModel) -> dict[str, Any]:
        counters = model.counters()
        most = {name: int(collectives.all_reduce(counters[name], "max")) for name in counters}
        return model.described() | most

    def _same_layout(self, manifest: dict[str, Any]) -> bool:
        layouts = {name: model.described()["layout"] for name, model in self.models.items()}
        said = {name: manifest["models"][name]["layout"] for name in layouts}
        return layouts == said and manifest["ranks_written"] == dist.get_world_size()

    def _random(self) -> dict[str, Any]:
        return {
            "host": seeds.random_state(),
            "layouts": {name: model.random_state() for name, model in self.models.items()},
        }

    def _set_random(self, state: dict[str, Any]) -> None:
        for name, model in self.models.items():
            model.set_random_state(state["layouts"][name])
        seeds.set_random_state(state["host"])


def of_run(
    config: RunConfig,
    models: Mapping[str, TrainedModel],
    export: Callable[[Path], None],
    frozen: Mapping[str, int | None] | None = None,
) -> TrainingCheckpoints:
    """Builds the TrainingCheckpoints that a run's config asks for. `frozen`: checksums of weights
    that it reads and does not train, by the option that names them.
    """
    chosen = config.checkpoint
    found = TrainingCheckpoints(
        Path(chosen.folder or f"{config.trainer.output}/checkpoints"),
        models,
        config,
        keep=chosen.keep,
        keep_mb=chosen.keep_mib * 2**20 / 1e6 or float("inf"),
        asynchronous=chosen.asynchronous,
        warn=chosen.on_failure == "warn",
        export=export if chosen.hf else None,
    )
    found.inputs = {name: {"weights": told} for name, told in (frozen or {}).items()}
    return found


def refuse_another(
    name: str, model: TrainedModel, manifest: dict[str, Any], config: RunConfig
) -> None:
    """Raises CheckpointError where a checkpoint is of another task or model."""
    saved = manifest["models"]
    if name not in saved:
        raise CheckpointError(
            f"It holds {', '.join(saved)}, and this run trains a {name}: it is another algorithm's."
        )
    described = model.described()
    _refuse_another_reference(described, saved[name])
    hf_config, said = (
        without_strange_sections(each)
        for each in (json.loads(json.dumps(described["hf_config"])), saved[name]["hf_config"])
    )
    if odd := sorted(
        key for key in hf_config.keys() | said.keys() if hf_config.get(key) != said.get(key)
    ):
        key = odd[0]
        raise CheckpointError(
            f"It is of another model: {key} is {said.get(key)} there and {hf_config.get(key)} in {described['path']}."
        )
    _refuse_other_adapters(described, saved[name])
    if (dtype := described["dtype"]) != saved[name]["dtype"]:
        raise CheckpointError(
            f"It was trained in {saved[name]['dtype']}, this run is in {dtype}: set model.dtype."
        )


def _refuse_other_adapters(described: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises CheckpointError where one of both has no adapters, others, or others' frozen weights."""
    here, there = described.get("adapters"), saved.get("adapters")
    if here != there:
        raise CheckpointError(
            f"It was trained with {_adapters_told(there)}, this run with {_adapters_told(here)}: set model.lora."
        )
    if described.get("base") != saved.get("base"):
        raise CheckpointError(
            f"Its adapters belong to other weights than those in {described['path']}, which have the same shapes: set model.path."
        )


def _refuse_another_reference(described: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises CheckpointError where both keep a reference, and it has other weights."""
    here, there = described.get("reference"), saved.get("reference")
    if None not in (here, there) and here != there:
        raise CheckpointError(
            f"It was trained against another reference (algorithm.kl) than the weights in {described['path']}, which have the "
            "same shapes: set model.path to the model that the run began with, or begin a new run with an export of the policy."
        )


def _adapters_told(adapters: Mapping[str, Any] | None) -> str:
    if adapters is None:
        return "no adapters"
    said = ", ".join(f"{name}={value}" for name, value in adapters.items())
    return f"adapters of {said}"
