"""The config from which a teacher is built."""

import pytest

from rftmega.config import LoRA, OptimizerConfig, ParallelConfig, RunConfig
from rftmega.config.options.teachers import Teacher
from rftmega.config.teacher_config import config_of


def test_a_teacher_has_its_own_folder_and_layout_and_nothing_that_learns() -> None:
    config = RunConfig(parallel=ParallelConfig(pipeline=2))
    config.model.path, config.model.dtype = "student", "bfloat16"
    config.model.lora, config.model.dropout = LoRA(rank=8), 0.1
    config.algorithm.kl.coef, config.algorithm.ema_beta = 0.1, 0.9
    config.rollout.router_replay = "trainer"
    config.optimizer.overlap_grad_reduce = True
    teacher = Teacher(path="teacher", parallel=ParallelConfig(tensor=4))
    found = config_of(config, teacher)
    assert (found.model.path, found.model.dtype) == ("teacher", "bfloat16")
    assert found.parallel == ParallelConfig(tensor=4)
    assert (found.model.lora.rank, found.model.dropout) == (0, 0.0)
    assert (found.algorithm.kl.coef, found.algorithm.ema_beta) == (0.0, 0.0)
    assert found.rollout.router_replay == "none"
    assert found.optimizer == OptimizerConfig()
    assert config.algorithm.kl.coef == 0.1, "the policy's is unchanged"


@pytest.mark.parametrize(
    ("backend", "found", "fp8"),
    [("auto", "megatron", "blockwise"), ("megatron", "megatron", "blockwise"), ("fsdp", "fsdp", "none")],
)  # fmt: skip
def test_a_teacher_has_its_own_backend_and_no_option_of_the_other(
    backend: str, found: str, fp8: str
) -> None:
    config = RunConfig(backend="megatron")
    config.model.fp8 = "blockwise"
    own = config_of(config, Teacher(path="teacher", backend=backend))  # type: ignore[arg-type]
    assert (own.backend, own.model.fp8) == (found, fp8)
    assert config.backend == "megatron"
