from pathlib import Path

from rftmega.config import AlgorithmConfig, CheckpointConfig, ModelConfig, RunConfig, TrainerConfig
from rftmega.config.options.algorithms import GAE
from rftmega.run.disk_space import needed
from tests.tiny_models import save_tiny

PARAMETERS = 189_632  # of the tiny Qwen3, as a dry run says


def test_exports_and_a_checkpoint_are_counted_where_they_go(tmp_path: Path) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(save_tiny(tmp_path, "qwen3")), dtype="bfloat16"),
        algorithm=AlgorithmConfig(ema_beta=0.9),
        trainer=TrainerConfig(output="out"),
    )
    assert needed(config) == {"out": 2 * 2 * PARAMETERS}
    config.trainer.export = False
    config.checkpoint = CheckpointConfig(every=5)
    saved = (2 + 4 + 8) * PARAMETERS + 4 * PARAMETERS  # weights, main parameters, Adam; the average
    assert needed(config) == {"out": 0, "out/checkpoints": saved}
    config.checkpoint.folder = "/scratch"
    assert needed(config) == {"out": 0, "/scratch": saved}
    config.checkpoint.hf = True
    assert needed(config)["/scratch"] == saved + 2 * 2 * PARAMETERS


def test_a_critic_is_saved_too_and_float32_has_no_main_parameters(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path, "qwen3"))
    config = RunConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        checkpoint=CheckpointConfig(every=5, folder="/scratch"),
    )
    alone = needed(config)["/scratch"]
    assert alone == 12 * PARAMETERS
    config.algorithm.advantage = GAE()
    assert needed(config)["/scratch"] == 2 * alone
