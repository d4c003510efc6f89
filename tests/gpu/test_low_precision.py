"""vLLM with weights of 8 bits on CUDA: the body of tests.distributed.test_low_precision_in_vllm.py."""

from pathlib import Path

import pytest

from rftmega.runtime import device
from tests.distributed import test_low_precision_in_vllm as body

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_log_probs_are_those_of_the_rounded_model(variant: str, tmp_path: Path) -> None:
    if device.current().type != "cuda":
        pytest.skip("this process computes on a CPU")
    body.test_log_probs_are_those_of_the_rounded_model_as_far_as_8_bits_of_activations_go(
        variant, tmp_path
    )
