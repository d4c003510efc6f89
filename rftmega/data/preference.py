"""Preference data: records with a chosen and a rejected response, converted to pairs of rows; for KTO
also records with one response and a label.

Published formats are supported: a prompt and two responses; two conversations that end with the
responses, with or without a separate prompt (UltraFeedback); two texts "Human: ... Assistant: ..."
(HH-RLHF); a conversation and two messages (ShareGPT); a prompt, response_0, response_1 and the
number of the better or of the safer one (PKU-SafeRLHF).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.media_positions import Placed
from rftmega.core.types import Preferences, Rows
from rftmega.data.chat.media_parts import media_moved, refuse_places
from rftmega.data.chat.messages import parsed
from rftmega.data.chat.template_forms import Messages
from rftmega.data.encoder import Encoder, by_assistant, check_continued
from rftmega.data.examples import load_examples, required
from rftmega.data.media_reader import MediaOptions, MediaReader
from rftmega.data.records import Record, value_at
from rftmega.data.records.epochs import Examples
from rftmega.data.sources import refuse_media
from rftmega.data.supervised import Example, RecordEncoder, refuse_two_completions, rows_of
from rftmega.data.tokenizer import Tokenizer

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
SPOKEN = re.compile(r"\n\n(Human|Assistant):")  # before each turn of HH-RLHF


@dataclass(frozen=True, slots=True)
class Pair:
    """Pair is a chosen and a rejected response, each with its prompt. The prompts are equal unless
    the record has two conversations that differ.
    """

    chosen: Example
    rejected: Example
    # whether the chosen and the rejected response are unsafe; None: not read
    unsafe: tuple[bool, bool] | None = None


@dataclass(frozen=True, slots=True)
class Preference:
    """Preference holds one record of preference data for the training of a policy: a chosen and a
    rejected response, or a single response, each with its prompt.
    """

    responses: tuple[Example, ...]
    desirable: tuple[bool, ...]  # of each response
    # of each response: its prompt with another example's response; (): not read
    mismatched: tuple[Example, ...] = ()

    @property
    def prompt(self) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Returns the token ids and the media of the prompt."""
        return self.responses[0].prompt_ids, self.responses[0].images

    @property
    def images(self) -> tuple[Placed, ...]:
        """Returns the media of all responses, which are in one micro-batch."""
        return tuple(image for each in self.responses for image in each.images)

    def with_responses_of(self, other: "Preference") -> tuple[Example, ...]:
        """Returns the prompts of this example with the responses of `other`, which must have as
        many.
        """
        return tuple(
            replace(own, response_ids=given.response_ids)
            for own, given in zip(self.responses, other.responses, strict=True)
        )


class Reading(NamedTuple):
    """Reading holds the components that read the records of one file. `reader`: reads the media of
    records; None: they may have none.
    """

    encoder: Encoder
    reader: MediaReader | None

    def for_record(self, record: Record) -> "Reading":
        return self._replace(encoder=self.encoder.for_record(record))


def load_preferences(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    most: int | None = None,
    safety: bool = False,
    media: MediaOptions | None = None,
    places: list[str] | None = None,
) -> Examples[Pair]:
    """Returns one Pair per record of `source`.

    `most`: maximum number of records to read, None: all. `safety`: whether to read which responses
    are unsafe; every record must then have these labels. `media`: the images, videos and waveforms
    that prompts may have; None: records that have any are refused. The location of each pair in the
    file is appended to `places`. Raises DataError as `load_prompts` does.
    """
    read = _reading(source, tokenizer, config, max_prompt_tokens, max_response_tokens, media, most)
    return load_examples(
        source,
        partial(_parse, read, safety),
        too_long=config.too_long,
        noun="pairs",
        places=places,
        report=read.encoder.report,
        most=most,
    )


def load_labelled(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    media: MediaOptions | None = None,
    places: list[str] | None = None,
    most: int | None = None,
) -> Examples[Preference]:
    """Returns one Preference per record of `source`: a response under data.response_key, and under
    data.desirable_key whether it is desirable. Arguments and errors as of `load_preferences`.
    """
    read = _reading(source, tokenizer, config, max_prompt_tokens, max_response_tokens, media, most)
    return load_examples(
        source,
        partial(_labelled, read),
        too_long=config.too_long,
        noun="responses",
        places=places,
        report=read.encoder.report,
        most=most,
    )


def preferences(pairs: Examples[Pair]) -> Examples[Preference]:
    """Returns the pairs as Preferences: the chosen response is desirable, the rejected one is not."""
    found = [Preference((pair.chosen, pair.rejected), (True, False)) for pair in pairs]
    return Examples(found, pairs.identities)


def with_mismatched(examples: Examples[Preference]) -> Examples[Preference]:
    """Returns the examples with mismatched responses, which KTO needs to estimate its baseline.

    An example's mismatched responses are those of the next example that has a different prompt. The
    first example follows the last one. If all prompts are equal, the next example is used. So the
    mismatched responses depend on the data set alone, not on the batches.
    """
    places = _following([example.prompt for example in examples])
    found = [
        replace(each, mismatched=each.with_responses_of(examples[place]))
        for each, place in zip(examples, places, strict=True)
    ]
    return Examples(found, examples.identities)


def _following(prompts: Sequence[Any]) -> list[int]:
    """Returns, for each index in `prompts`, the next index with a different prompt, or simply the
    next index if all prompts are equal. Index 0 follows the last index.
    """
    size = len(prompts)
    found = [(place + 1) % size for place in range(size)]
    if all(prompt == prompts[0] for prompt in prompts):
        return found
    for _ in range(2):  # the second time sees what follows the last place
        for place in reversed(range(size)):
            after = (place + 1) % size
            found[place] = found[after] if prompts[after] == prompts[place] else after
    return found


def preference_rows(
    examples: Sequence[Preference], reference: Callable[[Example], float] | None = None
) -> Preferences:
    """Returns a batch of examples as rows. `reference` returns the log-prob of a response under the
    reference policy; None for a loss without a reference.
    """
    labels = torch.tensor([label for each in examples for label in each.desirable])

    def rows(of: list[Example]) -> Rows:
        sums = None
        if reference is not None:
            sums = torch.tensor([reference(example) for example in of], dtype=torch.float64)
        return replace(rows_of(of), desirable=labels, reference_sum=sums)

    mismatched = [example for each in examples for example in each.mismatched]
    return Preferences(
        rows([example for each in examples for example in each.responses]),
        rows(mismatched) if mismatched else None,
    )


def pair_rows(pairs: Sequence[Pair]) -> Rows:
    """Returns the pairs as rows: row 2i is the chosen and row 2i + 1 the rejected response of pair
    i. Each row ends with one more position, for the score of the whole response (see
    `Rows.with_end`).
    """
    rows = rows_of([example for pair in pairs for example in (pair.chosen, pair.rejected)])
    labels = [label for pair in pairs for label in pair.unsafe or ()]
    return replace(rows, unsafe=torch.tensor(labels) if labels else None).with_end()


def _reading(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    max_prompt_tokens: int,
    max_response_tokens: int,
    media: MediaOptions | None,
    most: int | None,
) -> Reading:
    reader = None if media is None else media.reader(source, tokenizer, config, most)
    placeholders = () if media is None else media.placeholders(tokenizer)
    encoder = Encoder(
        tokenizer, config, max_prompt_tokens, max_response_tokens, placeholders=placeholders
    )
    return Reading(encoder, reader)


def _labelled(read: Reading, record: Record, index: int) -> Preference:
    config, key = read.encoder.config, read.encoder.config.desirable_key
    label = required(record, key, "data.desirable_key")
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(
            f'"{key}" is {label!r:.40}, but must be true (the response is desirable) or false.'
        )
    example = _example(read.for_record(record), record, config.response_key, "data.response_key")
    return Preference((example,), (bool(label),))


def _parse(read: Reading, safety: bool, record: Record, index: int) -> Pair:
    config, read = read.encoder.config, read.for_record(record)
    if read.reader is None:
        refuse_media(record, config)
    number = value_at(record, config.chosen_key)
    if isinstance(number, int) and not isinstance(number, bool):
        return _numbered(read, record, number, safety)
    if safety:
        raise DataError(
            f"algorithm.reward_model_loss=cost needs the number of the safer response (0 or 1) under data.chosen_key, as "
            f'safer_response_id, and "{config.chosen_key}" holds {number!r:.40}.'
        )
    return Pair(
        _example(read, record, config.chosen_key, "data.chosen_key"),
        _example(read, record, config.rejected_key, "data.rejected_key"),
    )


def _numbered(read: Reading, record: Record, chosen: int, safety: bool) -> Pair:
    """Returns the pair of a record with the responses response_0 and response_1, of which `chosen`
    is the number of the chosen one. `safety`: read which of them are unsafe.

    Raises DataError if a key is missing, or `chosen` is neither 0 nor 1.
    """
    key = read.encoder.config.chosen_key
    if chosen not in (0, 1):
        raise DataError(f'"{key}" is {chosen}, but must be 0 or 1, the number of a response.')
    numbers = (chosen, 1 - chosen)
    labels = [f"is_response_{number}_safe" for number in numbers] if safety else []
    needed = [*(f"response_{number}" for number in numbers), *labels]
    if missing := [name for name in needed if name not in record]:
        raise DataError(
            f'"{key}" is the number of a response, so the record needs {", ".join(missing)} as well.'
        )
    said = [record[name] for name in labels]
    if not all(isinstance(each, bool) for each in said):
        raise DataError(f"{' and '.join(labels)} must be true or false.")
    first, second = (_example(read, record, f"response_{number}", key) for number in numbers)
    return Pair(first, second, unsafe=(not said[0], not said[1]) if safety else None)


def _example(read: Reading, record: Record, key: str, option: str) -> Example:
    """Returns the response under `key` of a record, with its prompt, as token ids. `option`: the
    option that sets `key`, for error messages.
    """
    encoder = read.encoder
    config = encoder.config
    alone = value_at(record, config.prompt_key) is None
    value = required(record, key, option)
    conversation = _conversation(encoder, value, key, alone=alone)
    if conversation is None:
        prompt = encoder.given_prompt(record)
        check_continued(prompt, config)
        completion = value
    else:
        prompt, completion = conversation[:-1], conversation[-1]
        refuse_two_completions(prompt, config)
        if not alone:
            _check_prompt(encoder.given_prompt(record), prompt, config.prompt_key, key)
    if read.reader is None:
        refuse_places(prompt)
        return Example(encoder.prompt(prompt), encoder.completion(prompt, completion, key))
    prompt, record = media_moved(prompt, record, config)
    of_record = RecordEncoder(encoder, read.reader, read.reader.sources(record))
    return of_record.example(prompt, completion, key)


def _conversation(encoder: Encoder, value: Any, key: str, *, alone: bool) -> Messages | None:
    """Returns the messages of `value` if it is a whole conversation; None if it is a single
    response. `key`: the record's key of `value`, for error messages; `alone`: the record has no
    separate prompt.

    Raises DataError for a conversation that does not end with an assistant message, and for a
    single response in a record without a prompt.
    """
    found = parsed(value)
    if alone and isinstance(found, str):
        found = spoken(found)
    whole = isinstance(found, list) and (alone or len(found) > 1)
    if not whole:
        if alone:
            required({}, encoder.config.prompt_key, "data.prompt_key")
        return None
    messages: Messages = encoder.messages(found, key)
    if len(messages) < 2 or not by_assistant(messages):
        raise DataError(
            f'"{key}" must be a conversation of a user and the assistant, which the assistant ends.'
        )
    return messages


def spoken(text: str) -> Messages | None:
    """Returns the messages of a text in the format of HH-RLHF, in which "Human:" or "Assistant:"
    after an empty line begins a turn; None for any other text.
    """
    first, *turns = SPOKEN.split(text)
    if first.strip() or not turns:
        return None
    return [
        {"role": SPEAKERS[speaker], "content": said.strip()}
        for speaker, said in zip(turns[::2], turns[1::2], strict=True)
    ]


def _check_prompt(given: Any, context: Messages, prompt_key: str, key: str) -> None:
    """Raises DataError unless the conversation begins with the user messages of the prompt `given`.
    `context`: messages of the conversation before the response; `prompt_key`, `key`: the record's
    keys of prompt and conversation, for the error message.
    """
    said = [message["content"] for message in context if message["role"] == "user"]
    wanted = given if isinstance(given, list) else [{"role": "user", "content": given}]
    asked = [message["content"] for message in wanted if message["role"] == "user"]
    if said[: len(asked)] != asked:
        raise DataError(
            f'"{key}" is a whole conversation, which does not begin with "{prompt_key}". Leave one of them out, or give the '
            f'answer alone under "{key}".'
        )
