"""Prompts in checkpoints: images as well."""

import json

from rftmega.core.media_positions import PlacedImage
from rftmega.core.types import Prompt


def test_a_prompt_with_images_is_the_same_after_a_resume() -> None:
    image = PlacedImage("a.png", "0f", (1, 4, 4), 1, 4)
    prompt = Prompt((5, 6, 6, 6, 6, 7), "label", 3, "kind", "{}", 9, (image,))
    assert Prompt.from_state(json.loads(json.dumps(prompt.state()))) == prompt
    plain = Prompt((1, 2), "label", 3)
    assert Prompt.from_state(json.loads(json.dumps(plain.state()))) == plain


def test_a_prompt_of_an_older_checkpoint_has_what_was_known_of_it() -> None:
    assert Prompt.from_state([[1, 2], "label", 3]) == Prompt((1, 2), "label", 3)
