"""The tiny vision-language models are what transformers loads, and look at their images."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.tiny_vision import IMAGE, IMAGE_TEXT, KINDS, MERGE, images, save_tiny_vision


def logits(folder: Path, seen: list[Image.Image]) -> torch.Tensor:
    """Returns the logits [T, V] of a question about the images."""
    processed = AutoImageProcessor.from_pretrained(folder)(images=seen, return_tensors="pt")
    grids = processed["image_grid_thw"]
    # AutoTokenizer takes Qwen3.5's class for its folders, which expects an alphabet of bytes
    encode = PreTrainedTokenizerFast.from_pretrained(folder)
    parts = [{"type": "image"} for _ in seen]
    text = encode.apply_chat_template(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "Which is it?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.count(IMAGE_TEXT) == len(seen)
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_start|>assistant\n")
    for count in (grids.prod(-1) // MERGE**2).tolist():
        text = text.replace("<|image_pad|>", "<image>" * count, 1)
    text = text.replace("<image>", "<|image_pad|>")
    tokens = torch.tensor([encode.encode(text)])
    assert encode.decode(tokens[0]) == text
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(
            input_ids=tokens,
            pixel_values=processed["pixel_values"],
            image_grid_thw=grids,
            mm_token_type_ids=(tokens == IMAGE).int(),
        ).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it_and_the_last_logits_depend_on_both_images(
    kind: str, tmp_path: Path
) -> None:
    folder = save_tiny_vision(tmp_path, kind)
    first, second, _ = images()
    found = logits(folder, [first, second])
    assert found.isfinite().all()
    for other in ([Image.new("RGB", first.size), second], [first, Image.new("RGB", second.size)]):
        assert (logits(folder, other)[-1] - found[-1]).abs().max() > 0.1
