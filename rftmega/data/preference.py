"""Preference data: records with a chosen and a rejected response, converted to pairs of rows.

Published formats are supported: a prompt and two responses; two conversations that end with the
responses, with or without a separate prompt (UltraFeedback); two texts "Human: ... Assistant: ..."
(HH-RLHF); a conversation and two messages (ShareGPT); a prompt, response_0, response_1 and the
number of the better or of the safer one (PKU-SafeRLHF).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Rows
from rftmega.data.chat.media_parts import refuse_places
from rftmega.data.chat.messages import parsed
from rftmega.data.chat.template_forms import Messages
from rftmega.data.encoder import Encoder, by_assistant, check_continued
from rftmega.data.examples import load_examples, required
from rftmega.data.records import Record, value_at
from rftmega.data.sources import refuse_media
from rftmega.data.supervised import Example, refuse_two_completions, rows_of
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


def load_preferences(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    most: int | None = None,
    safety: bool = False,
) -> list[Pair]:
    """Returns one Pair per record of `source`.

    `most`: maximum number of records to read, None: all. `safety`: read which responses are unsafe,
    which every record must say. Raises DataError as `load_prompts` does.
    """
    encoder = Encoder(tokenizer, config, max_prompt_tokens, max_response_tokens)
    return load_examples(
        source,
        partial(_parse, encoder, safety),
        too_long=config.too_long,
        noun="pairs",
        report=encoder.report,
        most=most,
    )


def pair_rows(pairs: Sequence[Pair]) -> Rows:
    """Returns the pairs as rows: row 2i is the chosen and row 2i + 1 the rejected response of pair
    i. Each row ends with one more position, for the score of the whole response (see
    `Rows.with_end`).
    """
    rows = rows_of([example for pair in pairs for example in (pair.chosen, pair.rejected)])
    labels = [label for pair in pairs for label in pair.unsafe or ()]
    return replace(rows, unsafe=torch.tensor(labels) if labels else None).with_end()


def _parse(encoder: Encoder, safety: bool, record: Record, index: int) -> Pair:
    config, encoder = encoder.config, encoder.for_record(record)
    refuse_media(record, config)
    number = value_at(record, config.chosen_key)
    if isinstance(number, int) and not isinstance(number, bool):
        return _numbered(encoder, record, number, safety)
    if safety:
        raise DataError(
            f"algorithm.reward_model_loss=cost needs the number of the safer response (0 or 1) under data.chosen_key, as "
            f'safer_response_id, and "{config.chosen_key}" holds {number!r:.40}.'
        )
    return Pair(
        _example(encoder, record, config.chosen_key, "data.chosen_key"),
        _example(encoder, record, config.rejected_key, "data.rejected_key"),
    )


def _numbered(encoder: Encoder, record: Record, chosen: int, safety: bool) -> Pair:
    """Returns the pair of a record with the responses response_0 and response_1, of which `chosen`
    is the number of the chosen one. `safety`: read which of them are unsafe.

    Raises DataError if a key is missing, or `chosen` is neither 0 nor 1.
    """
    key = encoder.config.chosen_key
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
    first, second = (_example(encoder, record, f"response_{number}", key) for number in numbers)
    return Pair(first, second, unsafe=(not said[0], not said[1]) if safety else None)


def _example(encoder: Encoder, record: Record, key: str, option: str) -> Example:
    """Returns the response under `key` of a record, with its prompt, as token ids. `option`: the
    option that sets `key`, for error messages.
    """
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
    refuse_places(prompt)
    return Example(encoder.prompt(prompt), encoder.completion(prompt, completion, key))


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
