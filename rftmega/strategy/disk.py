"""What a run writes to disk."""

from model_providers.description import describe
from model_providers.hf_config import read_hf_config
from rftmega import device
from rftmega.config import RunConfig

OF_A_CHECKPOINT = 12  # bytes a parameter: itself and Adam's two moments, in float32


def needed(config: RunConfig) -> dict[str, int]:
    """Folder -> bytes that must be free there when the run starts: of the models that it exports, and of one checkpoint."""
    parameters = describe(read_hf_config(config.model.path)).parameters
    kept = {"auto": device.current().train_dtype.itemsize, "float32": 4, "bfloat16": 2}[config.model.dtype]
    copies = config.trainer.export * (1 + (config.algorithm.ema_beta > 0))
    found = {config.trainer.output: copies * parameters * kept}
    if config.checkpoint.every:
        found[config.checkpoint.folder or f"{config.trainer.output}/checkpoints"] = OF_A_CHECKPOINT * parameters
    return found
