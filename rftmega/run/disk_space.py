"""Estimates the disk space that a run needs."""

from rftmega.config import RunConfig
from rftmega.run.planning.models import POLICY, models_of
from rftmega.runtime import device

FLOAT, ADAM = 4, 8  # bytes per parameter: in float32, and for Adam's two moments


def needed(config: RunConfig) -> dict[str, int]:
    """Returns folder -> bytes that must be free in it when the run starts, for exported models and
    one checkpoint.
    """
    models = models_of(config, auto=str(device.current().train_dtype).removeprefix("torch."))
    policy, averages = models[POLICY], config.algorithm.ema_beta > 0
    exported = (1 + averages) * policy.model.parameters * policy.itemsize
    found = {config.trainer.output: config.trainer.export * exported}
    if config.checkpoint.every:
        trained = [planned for planned in models.values() if planned.optimizer is not None]
        saved = sum(
            planned.model.parameters * (kept_of(planned.itemsize) + ADAM) for planned in trained
        )
        saved += averages * FLOAT * policy.model.parameters + config.checkpoint.hf * exported
        found[config.checkpoint.folder or f"{config.trainer.output}/checkpoints"] = saved
    return found


def kept_of(itemsize: int) -> int:
    """Returns the bytes of the weight copies that a checkpoint stores per parameter: `itemsize`
    bytes in the model's dtype and, if that is low-precision, 4 bytes for the fp32 main copy.
    """
    return itemsize + FLOAT * (itemsize < FLOAT)
