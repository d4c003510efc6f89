"""Check that the images of every prompt fit into a micro-batch."""

from collections.abc import Sequence

from rftmega.core.errors import DataError
from rftmega.data.prompt_images import HasMedia


def check_patches(prompts: Sequence[HasMedia], places: Sequence[str], most: int) -> None:
    """Raises DataError if the images, videos and waveforms of one prompt together have more than
    `most` patches, the limit of a micro-batch (0: unlimited). `places`: location of each prompt in
    its file, for the error message.
    """
    own = [sum(image.patches for image in prompt.images) for prompt in prompts]
    larger = [
        f"{place}: its images have {patches} patches together"
        for place, patches in zip(places, own, strict=True)
        if most and patches > most
    ]
    if larger:
        raise DataError.first_of(
            [
                f"trainer.max_patches_per_micro_batch={most} has no room for {len(larger)} prompt(s): a prompt is not "
                f"divided. Set it to {max(own)} or more, or make the images smaller.",
                *larger,
            ]
        )
