"""Predicts the activation memory of a vision or audio encoder (tower), which is on the first stage.

Activations are counted as in `activations`. Every process of the stage computes the whole encoder,
over all patches of its micro-batch: tensor and context parallelism do not shard it.
"""

from rftmega.config import ParallelConfig, RunConfig
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.tower import AudioTower, VisionTower
from rftmega.run.planning.activations import Load
from rftmega.run.planning.models import PlannedModel


def patches_of(planned: PlannedModel, config: RunConfig, load: Load) -> int:
    """Returns the maximum number of patches in a micro-batch: all its prompts consist only of
    images, no two of which are equal. `load`: size of the micro-batch.
    """
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    most = load.tokens // longest * patches_of_prompt(planned.model, config)
    return min(most, config.trainer.max_patches_per_micro_batch or most)


def patches_of_prompt(model: ModelDescription, config: RunConfig) -> int:
    """Returns the maximum number of patches of a prompt."""
    rollout = config.rollout
    if model.tower is None or not (rollout.max_images or rollout.max_videos):
        return 0
    if isinstance(model.tower, AudioTower):
        return rollout.max_images * model.tower.positions
    return rollout.max_prompt_tokens * model.tower.merge**2


def _per_feature(tower: VisionTower | AudioTower) -> int:
    """Returns how many patches, or audio positions, the encoder `tower` merges into one feature."""
    return 2 if isinstance(tower, AudioTower) else tower.merge**2


def block_bytes(tower: VisionTower | AudioTower, itemsize: int) -> float:
    """Returns the bytes per patch that a layer of the encoder `tower` stores for the backward pass;
    `itemsize`: bytes of an activation.
    """
    # Inputs and outputs of both norms; a float32 mean and deviation for each norm.
    norms = itemsize * 4 * tower.width + 16
    # The joint queries, keys and values; queries and keys rotated; the output, and a log-sum.
    attention = itemsize * (3 + 2 + 1) * tower.width + 4 * tower.heads
    return norms + attention + itemsize * (4 if tower.gated else 2) * tower.ffn


def outside_bytes(tower: VisionTower | AudioTower, hidden: int, itemsize: int) -> float:
    """Returns the bytes per patch stored outside the layers of the encoder `tower`: the patch
    itself, and the merger of patches into features, for the decoder and for each layer with
    deepstack features. For audio, per position: its two frames, both convolutions before and after
    their activation, and the final projection. `hidden`: hidden size of the decoder; `itemsize`:
    bytes of an activation.
    """
    if isinstance(tower, AudioTower):
        return itemsize * (2 * tower.channels + (4 + 2 + 2) * tower.width + hidden / 2)
    merger = 4 * tower.width + hidden / tower.merge**2
    return itemsize * (tower.patch_width + (1 + tower.deepstack) * merger)


def in_flight(parallel: ParallelConfig, micro_batches: int) -> int:
    """Returns for how many micro-batches the first stage stores the encoder's activations at once.
    `micro_batches`: number of micro-batches of an optimizer step.
    """
    stages = parallel.pipeline
    return min(micro_batches, stages if parallel.virtual_pipeline == 1 else 2 * stages - 1)


def training(planned: PlannedModel, stage: int, load: Load, patches: int) -> int:
    """Returns the peak bytes of the encoder's activations in an optimizer step on one process; 0
    after the first pipeline stage. `load`: number of micro-batches; `patches`: image patches in
    each.
    """
    tower, hidden, itemsize = planned.model.tower, planned.model.hidden, planned.itemsize
    if tower is None or stage:
        return 0
    block, outside = block_bytes(tower, itemsize), outside_bytes(tower, hidden, itemsize)
    kept, working = tower.depth * block + outside, block
    if planned.parallel.recompute == "full":
        kept, working = itemsize * tower.depth * tower.width + outside, 2 * block
    if planned.frozen_tower:  # its features alone
        kept = itemsize * (1 + tower.deepstack) * hidden / _per_feature(tower)
    return int(patches * (in_flight(planned.parallel, load.micro_batches) * kept + working))


def scoring(planned: PlannedModel, stage: int, patches: int) -> int:
    """Returns the bytes of the encoder's activations in a forward pass without gradients: the
    working memory of one layer; 0 after the first pipeline stage. `patches`: image patches in a
    micro-batch.
    """
    if planned.model.tower is None or stage:
        return 0
    return int(patches * block_bytes(planned.model.tower, planned.itemsize))
