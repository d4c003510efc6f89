"""Writes the metrics of a training loop to TensorBoard and Weights & Biases, as LightRFT's arguments
ask.
"""

import os
from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rftmega.lightrft.strategy import StrategyBase
from rftmega.monitoring.observers.publish import QUIET


class MetricWriters:
    """MetricWriters writes metrics on rank 0; it is created with the first metrics."""

    def __init__(self, args: Any):
        """`args`: LightRFT's arguments, which may lack each of these. `use_tensorboard`: a folder.
        `use_wandb`: True, or an API key; then also `wandb_project`, `wandb_org`, `wandb_group`,
        `wandb_run_name` and `ckpt_path`, the folder of wandb's own files.
        """
        self.args = args
        self.tensorboard: SummaryWriter | None = None
        self.wandb: Any = None

    def write(self, metrics: Mapping[str, float], step: int, prefix: str = "train") -> None:
        """Writes the metrics of a step as "<prefix>/<name>"."""
        if not StrategyBase.is_rank_0():
            return
        named = {f"{prefix}/{name}": value for name, value in metrics.items()}
        if folder := getattr(self.args, "use_tensorboard", None):
            if self.tensorboard is None:
                self.tensorboard = SummaryWriter(str(folder))
            for name, value in named.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()
        if key := getattr(self.args, "use_wandb", None):
            if self.wandb is None:
                self.wandb = self._started(key)
            self.wandb.log({**named, f"{prefix}/global_step": step})

    def close(self) -> None:
        """Ends the writers; a later `write` starts them again."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()
        self.tensorboard = self.wandb = None

    def _started(self, key: Any) -> Any:
        import wandb  # optional, and slow to import

        if isinstance(key, str) and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
            wandb.login(key=key)
        names = {"entity": "wandb_org", "group": "wandb_group", "name": "wandb_run_name"}
        return wandb.init(
            project=getattr(self.args, "wandb_project", None) or "rftmega",
            dir=getattr(self.args, "ckpt_path", None),
            **{name: getattr(self.args, argument, None) for name, argument in names.items()},
            settings=wandb.Settings(**QUIET),
        )
