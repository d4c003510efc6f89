"""What a run writes to disk."""

from model_providers.description import describe
from model_providers.hf_config import read_hf_config
from rftmega import device
from rftmega.config import RunConfig


def needed(config: RunConfig) -> dict[str, int]:
    """Folder -> bytes that must be free there when the run starts: of the models that it exports."""
    parameters = describe(read_hf_config(config.model.path)).parameters
    kept = (
        device.current().train_dtype.itemsize
        if config.model.dtype == "auto"
        else {"float32": 4, "bfloat16": 2}[config.model.dtype]
    )
    copies = config.trainer.export * (1 + (config.algorithm.ema_beta > 0))
    return {config.trainer.output: copies * parameters * kept}
