"""Draft models of speculative decoding in vLLM, whose weights come from their folder while those of
the policy come from pushes.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.spec_decode.draft_model import DraftModelProposer


class DraftModelFromFolder(DraftModelProposer):
    """DraftModelFromFolder loads the draft model as `draft_load_config` says, which vLLM 0.32 does
    not read for draft models.
    """

    def _create_draft_vllm_config(self) -> VllmConfig:
        config = super()._create_draft_vllm_config()
        return replace(config, load_config=self.speculative_config.draft_load_config)


def reload_draft_model(worker: Any) -> None:
    """Loads the weights of a vLLM worker's draft model again, which were lost when the engine slept."""
    runner = worker.model_runner
    config = runner.drafter._create_draft_vllm_config()
    reload_weights(
        config,
        runner.drafter.model,
        weights_iterator=None,  # from the folder
        weights_path=None,
        is_checkpoint_format=True,
    )
