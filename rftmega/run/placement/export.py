"""Exports a model of a run as Hugging Face folders."""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega import weights
from rftmega.config import RunConfig, TrainerConfig
from rftmega.core.shards import TrainedAdapters, lost_share
from rftmega.models.hf import export_folder, peft_folder
from rftmega.run.placement.backend import Trainable
from rftmega.runtime.parallel.collectives import all_reduce

log = logging.getLogger(__name__)


def export(model: Trainable, folder: str | Path, trainer: TrainerConfig) -> None:
    """Writes the model as a Hugging Face folder: a policy, with its EMA in `folder`_ema if one is
    kept, or a value model as a classifier with one label. Adapters are merged into the weights, and
    also written to `folder`_adapter.

    A collective: every process calls it, with the weights on the device.
    """
    model.residency.finish()
    _export_weights(model, folder, trainer)
    if (averaged := model.averaged()) is not None:
        with averaged:
            _export_weights(model, f"{folder}_ema", trainer)


def rehearse(model: Trainable, config: RunConfig) -> None:
    """Runs every step of the final `export` except gathering and writing the weights, if
    trainer.export is set.

    A collective, called when the model is built. Raises CheckpointError, on all processes, if the
    export would fail.
    """
    if not config.trainer.export:
        return
    bucket_bytes, write = config.trainer.push_bucket_mib * 2**20, dist.get_rank() == 0
    exporter = weights.Exporter(model.shards(), model.replica_group, bucket_bytes=bucket_bytes)
    averages = config.algorithm.ema_beta > 0
    for folder in (config.exported, *([f"{config.exported}_ema"] if averages else [])):
        weights.rehearse_hf_folder(
            exporter,
            model.path,
            folder,
            write=write,
            classifier=model.classifier,
            quantised=config.trainer.export_quantised,
        )


def _export_weights(model: Trainable, folder: str | Path, trainer: TrainerConfig) -> None:
    bucket_bytes = trainer.push_bucket_mib * 2**20
    exporter = weights.Exporter(model.shards(), model.replica_group, bucket_bytes=bucket_bytes)
    write = dist.get_rank() == 0
    weights.export_hf_folder(
        exporter,
        model.path,
        folder,
        write=write,
        classifier=model.classifier,
        quantised=trainer.export_quantised,
    )
    if (adapters := model.adapters()) is not None:
        _tell_rounding(model, folder, write=write)
        held = (*adapters.shards, *adapters.head)
        alone = weights.Exporter(held, model.replica_group, bucket_bytes=bucket_bytes)
        _export_adapters(alone, adapters, model.path, Path(f"{folder}_adapter"), write=write)


def _tell_rounding(model: Trainable, folder: str | Path, *, write: bool) -> None:
    """Logs which share of the adapters' contribution is lost by rounding when they are merged into
    low-precision weights; a collective. `folder`: the exported folder, which the message names;
    `write`: whether this process logs.
    """
    if model.dtype == torch.float32:
        return
    lost = lost_share(model.shards(), lambda mine: torch.as_tensor(all_reduce(mine, "sum")))
    if write:
        log.warning(
            "%s: adapters were merged into weights of %s, and rounding took %.1f %% of what they add. %s_adapter has them whole: "
            "serve that, or merge it in float32 (rftmega convert merge, of a float32 folder).",
            folder,
            str(model.dtype).removeprefix("torch."),
            100 * lost,
            folder,
        )


def _export_adapters(
    exporter: weights.Exporter, adapters: TrainedAdapters, base: str, target: Path, *, write: bool
) -> None:
    """Writes the adapters, and a value head if there is one, to `target` in PEFT's format; a
    collective.

    `exporter`: gathers these tensors from all processes; `adapters`: their rank, alpha and dropout;
    `base`: folder of the frozen model; `write`: whether this process writes.
    """
    whole = peft_folder.trained_whole(each.name for each in exporter.planned)

    def written(tensors: Iterator[tuple[str, Tensor]]) -> None:
        draft = export_folder.begin(target)
        targets = peft_folder.write_pairs(draft, exporter.planned, tensors)
        peft_folder.write_config(
            draft,
            base=base,
            rank=adapters.rank,
            alpha=adapters.alpha,
            dropout=adapters.dropout,
            rslora=adapters.rslora,
            targets=targets,
            whole=whole,
        )
        export_folder.settle(draft, target)

    weights.gather_to(exporter, target, written if write else None)
