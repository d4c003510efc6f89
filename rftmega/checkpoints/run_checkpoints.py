"""Saves and resumes a run's training checkpoints. The checkpoint marked as latest is always
complete.
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
from rftmega.checkpoints.state_split import put_together, taken_apart
from rftmega.checkpoints.training_files import StoredModel, TrainingReader, write_rank, write_whole
from rftmega.config import RunConfig, changes, without_secrets
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import ShardBox
from rftmega.models.known_fields import without_strange_sections
from rftmega.runtime.parallel import collectives, seeds
from rftmega.runtime.parallel.watchdog import mark

log = logging.getLogger(__name__)


class TrainedModel(Protocol):
    """TrainedModel is the part of a model's interface that checkpoints use
    (`run.placement.backend.Trainable`).
    """

    def training_tensors(self) -> Iterable[ShardBox]:
        """Yields this process's blocks (ShardBox) of the weights, their average and the optimizer
        state.
        """

    def described(self) -> dict[str, Any]:
        """Returns a JSON description that identifies the model.

        It has "hf_config", "dtype" and "layout" (the parallel layout, which may differ on resume).
        With adapters, it also has "adapters" and "base", the checksum of the frozen weights; with a
        reference model also "reference", the checksum of its weights.
        """

    def counters(self) -> dict[str, int]:
        """Returns the optimizer's step counters on this process: "adam_steps"
        and "schedule_steps".
        """

    def restore(
        self, stored: StoredModel, *, strict: bool, optimizer: bool, schedule: bool
    ) -> None:
        """Restores the model's tensors and counters from `stored`, this model in a checkpoint; for
        the flags see `TrainingCheckpoints.load`.
        """

    def random_state(self) -> dict[str, Any]:
        """Returns the states of the random number generators that depend on the parallel layout."""

    def set_random_state(self, state: dict[str, Any]) -> None: ...


class TrainingCheckpoints:
    """TrainingCheckpoints saves and loads the `models` (by name) of a run; each checkpoint is a
    subfolder of `folder`.

    All processes must call its methods in the same order.
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
        """`keep`, `keep_mb`: most checkpoints to keep, and their total size in MB (10^6 bytes).
        `asynchronous`: `save` returns before the files are written. `warn`: a failed write logs a
        warning; without it, the next save or wait raises CheckpointError. `export`: writes a
        Hugging Face folder into the checkpoint, or raises CheckpointError on all processes.
        """
        self.folder, self.models, self.config = folder, models, config
        self.keep, self.keep_mb = keep, keep_mb
        self.asynchronous, self.warn, self.export = asynchronous, warn, export
        # read now: files may change before a save
        self._code = code_versions() if dist.get_rank() == 0 else {}
        # inputs of the run by option, on the first process: see `inputs.Inputs`
        self.inputs: dict[str, dict[str, Any]] = {}
        self._copies = HostCopies()
        self._writing: tuple[str, BackgroundWriter] | None = None

    def save(
        self, state: dict[str, Any], *, step: int, tag: str | None = None, latest: bool = True
    ) -> None:
        """Starts to write the checkpoint `tag` (default: step_<step>) of step number `step`, after
        waiting for the previous save. With `latest`, a run resumes from this checkpoint.

        `state`: JSON values and tensors, which must not change while they are written.
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
        """Waits until the last save is on disk; does nothing if there is none.

        If the write failed, raises CheckpointError or, with `warn`, logs a warning.
        """
        if self._writing is None:
            return
        name, writing = self._writing
        self._writing = None
        if errors := writing.wait():
            self._failed(name, errors)

    def leave(self) -> None:
        """Waits until a save in progress has ended, in a single-process run: another run may start
        in the same process. With several processes, does nothing, since each process is about to
        exit.
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
        """Restores models and random number generators from the checkpoint in `folder`, under any
        parallel layout. Returns the `state` that was passed to `save`.

        Without `strict`, weights that the checkpoint lacks stay unchanged; without `optimizer` or
        `schedule`, the optimizer's state or the schedule's progress is not restored. With `random`,
        generators are restored, but only under the same layout. Raises CheckpointError on every
        process if the checkpoint is of another model, of an unknown format, or damaged; the message
        names the previous checkpoint.
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
        """Loads the checkpoint that the option checkpoint.resume selects. Returns the `state` that
        was passed to `save`, or None if a new run is to start.
        """
        if (given := self._to_resume()) is None:
            return None
        state = self.load(given)
        if dist.get_rank() == 0:
            self._say_resumed(given)
        return state

    def _to_resume(self) -> Path | None:
        """Returns the folder of the checkpoint to resume, or None for a new run. The first process
        chooses for all processes: other hosts may not see a new checkpoint yet.
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
        """Logs which checkpoint folder (`given`) is resumed, and how config, inputs and code have
        changed since the run that saved it.
        """
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
        """Completes a checkpoint once all ranks have written their files: writes the manifest with
        the content `about`, renames the folder `draft` to `name`, updates the pointer file if
        `latest`, and then deletes expired checkpoints. Does nothing if `given_up` returns True
        before all ranks are done.
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
        """Runs `work` on the first process; a collective. Returns, on all processes, the
        description of the OSError that it raised, or None.
        """
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
    """Builds the TrainingCheckpoints for a run's config. `export`: writes the model as a Hugging
    Face folder; `frozen`: option (such as reward.model_path) -> checksum of the model weights that
    the run reads and does not train.
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
    """Raises CheckpointError if the checkpoint with the content `manifest` does not fit the model
    `name` of this run: its algorithm, model, dtype, reference or adapters differ.
    """
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
    """Raises CheckpointError if run and checkpoint differ in their adapters or in the frozen
    weights to which the adapters belong. `described`, `saved`: `TrainedModel.described()` of the
    run and of the checkpoint.
    """
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
    """Raises CheckpointError if the reference models of run and checkpoint have different weights.
    `described`, `saved`: `TrainedModel.described()` of the run and of the checkpoint.
    """
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
