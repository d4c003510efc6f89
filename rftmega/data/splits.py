"""Loading of the datasets that a config names: training data in their order, and evaluation sets by
name.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from rftmega.config import RunConfig, task_source
from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.image_patches import check_patches
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.data.media_reader import MediaOptions
from rftmega.data.preference import (
    Preference,
    load_labelled,
    load_preferences,
    pair_rows,
    preferences,
    with_mismatched,
)
from rftmega.data.prompt_images import HasMedia, check_images
from rftmega.data.prompts import load_prompts
from rftmega.data.records.epochs import Examples
from rftmega.data.sampler import PromptOrder, order_of
from rftmega.data.supervised import Example, load_supervised, rows_of
from rftmega.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)


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
    media = MediaOptions.of(config)
    load = partial(_prompts, config, tokenizer, media, check, rank, ranks, most)

    @cache
    def held_out() -> dict[str, list[Prompt]]:
        return {name: load(source) for name, source in config.data.held_out.items()}

    def load_training(source: str) -> list[Prompt]:
        found = load(source, teachers=config.algorithm.teachers)
        if task_source(source) is None or most is not None:
            return found
        return _without(found, source, [each for own in held_out().values() for each in own])

    order = order_of(
        config.data,
        load_training,
        batch_size=config.trainer.prompts_per_step,
        seed=config.trainer.seed,
    )
    return order, held_out()


def _without(prompts: list[Prompt], source: str, held_out: Sequence[Prompt]) -> list[Prompt]:
    """Removes the tasks that are held out for evaluation from a task library's training tasks.
    Returns the remaining tasks, and logs the number of removed ones.

    `prompts`: the training tasks; `source`: their name in data.train, such as
    "reasoning_gym://chain_sum"; `held_out`: the evaluation tasks. Training and evaluation tasks can
    overlap although their seeds differ, since some libraries draw task i with seed + i. Raises
    DataError if no task remains.
    """
    assert isinstance(prompts, Examples)
    known = {prompt.token_ids for prompt in held_out}
    left = prompts.where(lambda prompt: prompt.token_ids not in known)
    dropped = len(prompts) - len(left)
    if dropped:
        log.info(
            "%s: left out %d of %d tasks, which are held out for evaluation",
            source,
            dropped,
            len(prompts),
        )
    if not left:
        raise DataError(
            f"{source}: each of its {len(prompts)} tasks is held out for evaluation (data.eval). Raise its size, "
            "or lower that of data.eval."
        )
    return left


def held_out_of(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    check: Callable[[Sequence[Prompt]], None],
    columns: bool = False,
) -> dict[str, list[Prompt]]:
    """Returns evaluation set's name -> its prompts, as `prompts_of` does, without the training data.
    `columns`: prompts keep the columns of their records even if no reward reads them.
    """
    media = MediaOptions.of(config)
    load = partial(_prompts, config, tokenizer, media, check, 0, 1, None, columns=columns)
    return {name: load(source) for name, source in config.data.held_out.items()}


def _prompts(
    config: RunConfig,
    tokenizer: Tokenizer,
    media: MediaOptions,
    check: Callable[[Sequence[Prompt]], None],
    rank: int,
    ranks: int,
    most: int | None,
    source: str,
    *,
    columns: bool = False,
    teachers: Sequence[Teacher] = (),
) -> list[Prompt]:
    """Returns the checked prompts of the data source `source`. `media`: the model's inputs other than text;
    the other arguments as of `prompts_of` and `held_out_of`.
    """
    places: list[str] = []
    prompts = load_prompts(
        source,
        tokenizer,
        config.data,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        columns=columns or config.reads_columns,
        shown=config.trainer.trajectories > 0,
        processor=media.processor,
        max_images=media.max_images,
        max_videos=media.max_videos,
        places=places,
        most=most,
        teachers=teachers,
    )
    try:
        check(prompts)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    _check_media(config, media, prompts, places, rank, ranks)
    return prompts


def given_of(
    config: RunConfig,
    tokenizer: Tokenizer,
    most: int | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[PromptOrder[Any], dict[str, Any]]:
    """Returns the stream of training batches in their order, and a dictionary from the name of each
    evaluation set to its rows, for supervised fine-tuning (algorithm.task=sft) or reward models
    (task=reward_model). For task=preference, both hold lists of examples, of which
    `preference_rows` makes rows once the reference has scored them.

    `most`: maximum number of records to read per file, None: all. `rank`, `ranks`: as in
    `prompts_of`.
    """
    collated: dict[str, Callable[..., Any]] = {"sft": rows_of, "reward_model": pair_rows}
    rows = collated.get(config.algorithm.task, list)

    def load(source: str) -> Sequence[Any]:
        if config.algorithm.task == "sft":
            return _examples(config, tokenizer, source, most, rank, ranks)
        if config.algorithm.task == "preference":
            return _preferences(config, tokenizer, source, most, rank, ranks)
        safety = config.algorithm.reward_model_loss == "cost"
        limits = _limits(config)
        return load_preferences(
            source,
            tokenizer,
            config.data,
            max_prompt_tokens=limits["max_prompt_tokens"],
            max_response_tokens=limits["max_response_tokens"],
            safety=safety,
            most=most,
        )

    size, seed = config.trainer.prompts_per_step, config.trainer.seed
    order = order_of(config.data, load, batch_size=size, seed=seed, collate=rows)
    return order, {name: rows(load(source)) for name, source in config.data.held_out.items()}


def _examples(
    config: RunConfig,
    tokenizer: Tokenizer,
    source: str,
    most: int | None,
    rank: int,
    ranks: int,
) -> list[Example]:
    """Returns the supervised examples of `source`, whose media were decoded once."""
    media, places = MediaOptions.of(config), list[str]()
    limits = _limits(config)
    examples = load_supervised(
        source, tokenizer, config.data, media=media, places=places, **limits, most=most
    )
    _check_media(config, media, examples, places, rank, ranks)
    return examples


def _preferences(
    config: RunConfig,
    tokenizer: Tokenizer,
    source: str,
    most: int | None,
    rank: int,
    ranks: int,
) -> Examples[Preference]:
    """Returns the preferences of `source`, whose media were decoded once; for KTO with mismatched
    responses.
    """
    media, places = MediaOptions.of(config), list[str]()
    given: dict[str, Any] = {"media": media, "places": places, "most": most, **_limits(config)}
    if config.reads_pairs:
        found = preferences(load_preferences(source, tokenizer, config.data, **given))
    else:
        found = load_labelled(source, tokenizer, config.data, **given)
    _check_media(config, media, found, places, rank, ranks)
    return with_mismatched(found) if config.algorithm.scores_mismatched else found


def _check_media(
    config: RunConfig,
    media: MediaOptions,
    loaded: Sequence[HasMedia],
    places: Sequence[str],
    rank: int,
    ranks: int,
) -> None:
    """Checks that the media of each prompt fit into a micro-batch, and decodes this process's share
    of them. `places`: location of each prompt in its file.

    Raises DataError for media that do not fit or are broken.
    """
    check_patches(loaded, places, config.trainer.max_patches_per_micro_batch)
    audio_processor = media.processor if isinstance(media.processor, AudioProcessor) else None
    check_images(loaded, places, rank=rank, ranks=ranks, audio_processor=audio_processor)


def ptx_of(
    config: RunConfig,
    tokenizer: Tokenizer,
    most: int | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> PromptOrder[Example] | None:
    """Returns the stream of batches from data.ptx, supervised examples that a run trains on
    together with the rewarded completions; None if data.ptx is empty. `most`: maximum number of
    records to read, None: all. `rank`, `ranks`: as in `prompts_of`.
    """
    if not config.data.ptx:
        return None
    examples = _examples(config, tokenizer, config.data.ptx, most, rank, ranks)
    size = config.given_completions or config.trainer.prompts_per_step
    seed = f"{config.trainer.seed}/ptx"
    return PromptOrder(examples, batch_size=size, seed=seed, collate=rows_of)


def _limits(config: RunConfig) -> dict[str, int]:
    chosen = config.rollout
    return {
        "max_prompt_tokens": chosen.max_prompt_tokens,
        "max_response_tokens": chosen.max_response_tokens,
    }
