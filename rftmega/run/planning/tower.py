"""Predicts the activation memory of a vision or audio tower, which is on the first stage.

The count is that of `activations`. Every process of the stage computes the whole tower, over all
patches of its micro-batch: tensor and context parallelism divide nothing.
"""

from rftmega.config import ParallelConfig, RunConfig
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.tower import AudioTower, VisionTower
from rftmega.run.planning.activations import Load
from rftmega.run.planning.models import PlannedModel


def patches_of(planned: PlannedModel, config: RunConfig, load: Load) -> int:
    """Returns the patches of a micro-batch whose prompts consist of different images alone."""
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
    """Returns how many patches, or audio positions, form one feature."""
    return 2 if isinstance(tower, AudioTower) else tower.merge**2


def block_bytes(tower: VisionTower | AudioTower, itemsize: int) -> float:
    """Returns the bytes per patch that a layer stores for the backward pass."""
    # Inputs of both norms, and of what follows them; a mean and a deviation in float32 each.
    norms = itemsize * 4 * tower.width + 16
    # The joint queries, keys and values; queries and keys rotated; the output, and a log-sum.
    attention = itemsize * (3 + 2 + 1) * tower.width + 4 * tower.heads
    return norms + attention + itemsize * (4 if tower.gated else 2) * tower.ffn


def outside_bytes(tower: VisionTower | AudioTower, hidden: int, itemsize: int) -> float:
    """Returns the bytes per patch stored outside the layers: the patch itself, and the merger of
    patches into features, for the decoder and for each layer with deepstack features. For audio
    these are the two frames of a position, both convolutions before and after their activation, and
    the final projection.
    """
    if isinstance(tower, AudioTower):
        return itemsize * (2 * tower.channels + (4 + 2 + 2) * tower.width + hidden / 2)
    merger = 4 * tower.width + hidden / tower.merge**2
    return itemsize * (tower.patch_width + (1 + tower.deepstack) * merger)


def in_flight(parallel: ParallelConfig, micro_batches: int) -> int:
    """Returns how many micro-batches the first stage's first chunk stores at once."""
    stages = parallel.pipeline
    return min(micro_batches, stages if parallel.virtual_pipeline == 1 else 2 * stages - 1)


def training(planned: PlannedModel, stage: int, load: Load, patches: int) -> int:
    """Returns the peak bytes of an optimizer step."""
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
    """Returns the working memory of one layer in bytes; nothing is stored for a backward pass."""
    if planned.model.tower is None or stage:
        return 0
    return int(patches * block_bytes(planned.model.tower, planned.itemsize))
