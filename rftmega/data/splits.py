"""Loading of the datasets that a config names: training data in their order, and evaluation sets by
name.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rftmega.config import RunConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt, Rows
from rftmega.data.media.audio_processor import audio_processor_of
from rftmega.data.media.image_processor import processor_of
from rftmega.data.patches import check_patches
from rftmega.data.preference import load_preferences, pair_rows
from rftmega.data.prompt_images import check_images
from rftmega.data.prompts import load_prompts
from rftmega.data.sampler import PromptOrder, order_of
from rftmega.data.supervised import Example, load_supervised, rows_of
from rftmega.data.tokenizer import Tokenizer


def prompts_of(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    check: Callable[[Sequence[Prompt]], None],
    rank: int = 0,
    ranks: int = 1,
    most: int | None = None,
) -> tuple[PromptOrder[Prompt], dict[str, list[Prompt]]]:
    """Returns the stream of training prompts in their order, and a dictionary from the name of each
    evaluation set to its prompts.

    `check` validates the prompts of a file and raises DataError, to which the file name is added.
    Each of the `ranks` processes that load the same files decodes its share of the images and
    waveforms; `rank` is this process's index. `most`: maximum number of records to read per file,
    None: all.
    """
    audio_processor = audio_processor_of(config.model.path)
    processor = audio_processor or processor_of(config.model.path)

    def load(source: str) -> list[Prompt]:
        places: list[str] = []
        prompts = load_prompts(
            source,
            tokenizer,
            config.data,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            columns=config.reads_columns,
            processor=processor,
            max_images=config.rollout.max_images,
            max_videos=config.rollout.max_videos,
            places=places,
            most=most,
        )
        try:
            check(prompts)
        except DataError as error:
            raise DataError(f"{source}: {error}") from error
        check_patches(prompts, places, config.trainer.max_patches_per_micro_batch)
        check_images(prompts, places, rank=rank, ranks=ranks, audio_processor=audio_processor)
        return prompts

    order = order_of(
        config.data, load, batch_size=config.trainer.prompts_per_step, seed=config.trainer.seed
    )
    return order, {name: load(source) for name, source in config.data.held_out.items()}


def given_of(
    config: RunConfig, tokenizer: Tokenizer, most: int | None = None
) -> tuple[PromptOrder[Any], dict[str, Rows]]:
    """Returns the stream of training batches in their order, and a dictionary from the name of each
    evaluation set to its rows, for supervised fine-tuning (algorithm.task=sft) or reward models
    (task=reward_model).

    `most`: maximum number of records to read per file, None: all.
    """
    safety = config.algorithm.reward_model_loss == "cost"
    read: Callable[..., Sequence[Any]] = partial(load_preferences, safety=safety)
    rows: Callable[..., Rows] = pair_rows
    if config.algorithm.task == "sft":
        read, rows = load_supervised, rows_of

    def load(source: str) -> Sequence[Any]:
        return read(source, tokenizer, config.data, **_limits(config), most=most)

    size, seed = config.trainer.prompts_per_step, config.trainer.seed
    order = order_of(config.data, load, batch_size=size, seed=seed, collate=rows)
    return order, {name: rows(load(source)) for name, source in config.data.held_out.items()}


def ptx_of(
    config: RunConfig, tokenizer: Tokenizer, most: int | None = None
) -> PromptOrder[Example] | None:
    """Returns the stream of batches from data.ptx, supervised examples that a run trains on
    together with the rewarded completions; None if data.ptx is empty. `most`: maximum number of
    records to read, None: all.
    """
    if not config.data.ptx:
        return None
    limits = _limits(config)
    examples = load_supervised(config.data.ptx, tokenizer, config.data, **limits, most=most)
    size, seed = config.trainer.prompts_per_step, f"{config.trainer.seed}/ptx"
    return PromptOrder(examples, batch_size=size, seed=seed, collate=rows_of)


def _limits(config: RunConfig) -> dict[str, int]:
    chosen = config.rollout
    return {
        "max_prompt_tokens": chosen.max_prompt_tokens,
        "max_response_tokens": chosen.max_response_tokens,
    }
