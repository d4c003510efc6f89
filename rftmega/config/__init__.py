"""Options of a run: schema, loading and checks; the subpackage `validation` finds conflicts.

Importing this package is fast: it imports neither torch nor Megatron.
"""

from rftmega.config.config_diff import changes
from rftmega.config.load import load, parse_override, plugins_of
from rftmega.config.options.adapters import COLUMNS_OF_A_SCALE, LoRA
from rftmega.config.options.algorithms import AlgorithmConfig, KLConfig
from rftmega.config.pickling import restored
from rftmega.config.pushed_adapters import SERVED_VOCABULARY, served_rank, why_merged
from rftmega.config.schema import (
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    FaultsConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.config.secrets import without_secrets
from rftmega.config.sources import LONGEST_CYCLE, shares, split_source
from rftmega.config.task_libraries import task_source

__all__ = [
    "COLUMNS_OF_A_SCALE",
    "LONGEST_CYCLE",
    "SERVED_VOCABULARY",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "FaultsConfig",
    "KLConfig",
    "LoRA",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainerConfig",
    "changes",
    "load",
    "parse_override",
    "plugins_of",
    "restored",
    "served_rank",
    "shares",
    "split_source",
    "task_source",
    "why_merged",
    "without_secrets",
]
