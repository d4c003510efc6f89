"""Selects a renderer of the renderers library for a model folder, and compares it with the folder's
chat template.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rftmega.core.errors import ConfigError, DataError
from rftmega.core.json_files import read_json_object
from rftmega.core.types import Turn
from rftmega.data.chat.completion_parsers import (
    Parsed,
    Parser,
    SampledCompletion,
    deepseek,
    llama,
    parsed_of,
    too_deep,
)
from rftmega.data.chat.replies import Bridge, ChatTokenizer, Control, Messages, Specs, text_of

logger = logging.getLogger(__name__)
SHORT, REMEMBERED = 64, 1024  # characters of a text, and number of texts, whose tokens are cached

# model_type of config.json -> renderers of the library that may fit such a folder. The library's
# own choice depends on the model's name on the hub, which a folder lacks.
CANDIDATES = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3", "prime-qwen3"),
    "qwen3_next": ("qwen3",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "kimi_k2": ("kimi-k2",),
    "llama": ("llama-3",),
    "minimax": ("minimax-m2",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "gpt_oss": ("gpt-oss",),
    "hunyuan_v3": ("hy3",),
}
# renderers whose completions are parsed without the library: its pattern of a fence takes minutes
# for a run of spaces, and it takes a broken call of Llama for text
READ_HERE: dict[str, Parser] = {"deepseek-v3": deepseek, "deepseek-r1": deepseek, "llama-3": llama}
SPEC = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def _said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _called(word: str, number: int) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": {"word": word}}
    return {"type": "function", "id": f"call0000{number}", "function": function}


ASKED = _said("user", "What is a yak?")
CALLED = _said("assistant", "", tool_calls=[_called("yak", 0)])
SPOKEN = _said("assistant", "I look.", tool_calls=[_called('yák "2"', 0)])
THOUGHT = _said("assistant", "", tool_calls=[_called("yak", 0)], reasoning_content="Let me see.")
TWICE = _said("assistant", "", tool_calls=[_called("yak", 0), _called("ox", 1)])
FOUND = _said("tool", "An ox\nof Tibet.", name="look_up", tool_call_id="call00000")
AGAIN = _said("tool", "A cow.", name="look_up", tool_call_id="call00001")
ANSWERED = _said("assistant", "An ox.")
MUSED = _said("assistant", "An ox.", reasoning_content="I know that.")
SURE = _said("user", "Are you sure?")
SYSTEM = _said("system", "Be brief.")
# initial contexts of a rollout
HEADS: tuple[tuple[Messages, Specs], ...] = (
    ([ASKED], ()),
    ([SYSTEM, ASKED], ()),
    ([ASKED], (SPEC,)),
    ([SYSTEM, ASKED], (SPEC,)),
)
# earlier messages, a completion, replies to it, and tools
TURNS: tuple[tuple[Messages, dict[str, Any], Messages, Specs], ...] = (
    ([ASKED], CALLED, [FOUND], (SPEC,)),
    ([SYSTEM, ASKED], SPOKEN, [FOUND], (SPEC,)),
    ([ASKED], THOUGHT, [FOUND], (SPEC,)),
    ([ASKED], TWICE, [FOUND, AGAIN], (SPEC,)),
    ([ASKED], ANSWERED, [SURE], ()),
    ([ASKED], MUSED, [SURE], ()),
    ([ASKED, CALLED, FOUND], ANSWERED, [SURE], (SPEC,)),
    ([ASKED, THOUGHT, FOUND], MUSED, [SURE], (SPEC,)),
    ([ASKED, CALLED, FOUND], CALLED, [FOUND], (SPEC,)),
)


@dataclass(frozen=True, slots=True)
class LibraryRenderer:
    """LibraryRenderer parses completions and renders the messages after them with `inner`, a
    renderer of the renderers library.
    """

    name: str
    inner: Any

    def parse(
        self,
        tokenizer: ChatTokenizer,
        completion: SampledCompletion,
        end: Sequence[int],
        tools: Specs,
    ) -> Parsed | None:
        """Returns the parsed completion; None if the library fails. `end`: the token that ended the
        completion, or empty if it was truncated.
        """
        if parser := READ_HERE.get(self.name):
            return parser(tokenizer, completion)
        if too_deep(text_of(tokenizer, completion.token_ids)):
            return None
        ids = [*completion.token_ids, *end]
        specs = [dict(each) for each in tools] or None
        try:
            response = self.inner.parse_response(
                ids, tools=specs, prompt_ids=list(completion.context)
            )
        except Exception as error:  # the library's, whatever the model wrote
            logger.debug("the renderer %s can't read a completion", self.name, exc_info=error)
            return None
        return parsed_of(tokenizer, completion.token_ids, response)

    def bridge(
        self,
        previous_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Messages,
        tools: Specs,
    ) -> Bridge | None:
        """Returns the token ids after a completion if `messages` reply to it; None if the format
        rewrites earlier text, or the library fails. `previous_ids`: the token ids before the
        completion.
        """
        known = [*previous_ids, *completion_ids]
        specs = [dict(each) for each in tools] or None
        try:
            found = self.inner.bridge_to_next_turn(
                list(previous_ids), list(completion_ids), messages, tools=specs
            )
        except Exception as error:  # the library's, for whatever messages
            logger.debug("the renderer %s can't go on", self.name, exc_info=error)
            return None
        if found is None or found.token_ids[: len(known)] != known:
            return None
        indices = found.message_indices[len(known) :]
        content = found.is_content[len(known) :] or [True] * len(indices)
        turns = [
            Turn(message["role"], *_span(number, indices, content), message.get("name", ""))
            for number, message in enumerate(messages)
        ]
        return Bridge(tuple(found.token_ids[len(known) :]), tuple(turns))


def _span(number: int, indices: Sequence[int], content: Sequence[bool]) -> tuple[int, int]:
    """Returns the range of the content tokens of message `number`, empty if it has none. `indices`:
    message index of each token; `content`: whether each token belongs to a message's content.
    """
    own = [place for place, index in enumerate(indices) if index == number]
    said = [place for place in own if content[place]]
    if not said:
        return (own[0], own[0]) if own else (0, 0)
    return said[0], said[-1] + 1


def library_renderer(tokenizer: ChatTokenizer, name: str) -> LibraryRenderer | None:
    """Returns the renderer `name` of the library. "auto" returns one that renders conversations
    like the chat template in the model folder, or None if the library has no such renderer.

    A renderer given by name must agree with the template on the beginning and the continuation of
    conversations. Raises ConfigError if the renderer disagrees with the template or does not fit
    the tokenizer.
    """
    if name != "auto":
        found = _built(tokenizer, name)
        if isinstance(found, str):
            raise ConfigError(f"environment.renderer={name} does not fit the model: {found}")
        if difference := _difference(tokenizer, found, rewritten=False):
            raise ConfigError(
                f"environment.renderer={name} writes otherwise than the model's chat template: {difference}. Take "
                "environment.renderer=template, which goes by the template alone."
            )
        return LibraryRenderer(name, found)
    for each in CANDIDATES.get(_model_type(tokenizer), ()):
        found = _built(tokenizer, each)
        if isinstance(found, str):
            logger.info("renderer %s is not taken: %s", each, found)
        elif difference := _difference(tokenizer, found, rewritten=True):
            logger.info("renderer %s is not taken: it differs in %s", each, difference)
        else:
            return LibraryRenderer(each, found)
    return None


def _model_type(tokenizer: ChatTokenizer) -> str:
    """Returns model_type in the config.json of the tokenizer's folder; "" if the file or the field
    is missing.
    """
    path = Path(tokenizer.inner.name_or_path) / "config.json"
    return str(read_json_object(path).get("model_type", "")) if path.is_file() else ""


def _built(tokenizer: ChatTokenizer, name: str) -> Any:
    """Returns the renderer `name` of the library, or an error message if it can't be built for the
    tokenizer.
    """
    from renderers import create_renderer
    from renderers.configs import config_from_name

    try:
        config = config_from_name(name)
        given = dict(tokenizer.chat.given)
        inner = _remembering(tokenizer.inner, tokenizer.control)
        return create_renderer(inner, config, chat_template_kwargs=given)
    # a special token that the tokenizer lacks, an option of another template, no network
    except (AssertionError, ValueError, TypeError, KeyError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def _remembering(inner: Any, control: Control) -> Any:
    """Returns a copy of the transformers tokenizer `inner` that caches the token ids of short
    texts: a renderer encodes the text of its format several times per turn, and transformers takes
    0.1 ms for each. Also caches the call with a letter by which a renderer tests twice per turn
    whether the tokenizer returns offsets.

    `control` encodes texts, in which control-token names that it has replaced become ordinary
    letters.
    """
    kept = lru_cache(REMEMBERED)(lambda text: tuple(control.encode(text)))
    letter = lru_cache(1)(lambda text, **options: inner(text, **options))

    def encode(text: str, *given: Any, **options: Any) -> list[int]:
        if len(text) <= SHORT and not given and options == {"add_special_tokens": False}:
            return list(kept(text))
        if not given and options == {"add_special_tokens": False}:
            return control.encode(text)
        found: list[int] = inner.encode(text, *given, **options)
        return found

    def decode(token_ids: Any, *given: Any, **options: Any) -> str:
        if not given and options == {"skip_special_tokens": False}:
            text: str = inner.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        else:
            text = inner.decode(token_ids, *given, **options)
        return text

    def call(text: str, **options: Any) -> Any:
        if text == "a":
            return letter(text, **options)
        if options == {"add_special_tokens": False, "return_offsets_mapping": True}:
            ids, places = control.encode_places(text)
            return {"input_ids": ids, "offset_mapping": places}
        return inner(text, **options)

    found = copy.copy(inner)
    called = {"__call__": lambda own, text, **options: call(text, **options)}
    found.__class__ = type(type(inner).__name__, (type(inner),), called)
    found.encode = encode
    if inner.is_fast and not inner.clean_up_tokenization_spaces:
        found.decode = decode  # see replies.text_of
    return found


def _difference(tokenizer: ChatTokenizer, renderer: Any, *, rewritten: bool) -> str:
    """Returns a description of the first test conversation that the renderer and the template
    render differently; "" if there is none.

    `rewritten`: also compares the rendering of whole conversations, which is needed after the
    template has rewritten earlier text.
    """
    for messages, tools in HEADS:
        if not _alike(tokenizer, renderer, messages, tools):
            return _named(messages, tools)
    for before, completion, messages, tools in TURNS:
        whole = [*before, completion, *messages]
        if rewritten and not _alike(tokenizer, renderer, whole, tools):
            return _named(whole, tools)
        if not _goes_on(tokenizer, renderer, (before, whole, messages), tools):
            return f"how it goes on in {_named(whole, tools)}"
    return ""


def _named(messages: Messages, tools: Specs) -> str:
    roles = " ".join(message["role"] for message in messages)
    return f"the conversation [{roles}]{' with tools' if tools else ''}"


def _written(tokenizer: ChatTokenizer, messages: Messages, tools: Specs) -> list[int] | None:
    """Returns the token ids of messages rendered by the template; None if the template refuses the
    messages.
    """
    try:
        text = tokenizer.template.text(messages, open_=True, tools=tools)
        return list(tokenizer.encode_reply(text))
    except DataError:
        return None


def _alike(tokenizer: ChatTokenizer, renderer: Any, messages: Messages, tools: Specs) -> bool:
    """Returns whether the renderer and the template render messages to the same tokens, or both
    refuse the messages.
    """
    system = tokenizer.chat.system
    given = messages
    if system and messages[0]["role"] != "system":
        given = [{"role": "system", "content": system}, *messages]
    try:
        specs = [dict(each) for each in tools] or None
        ids = renderer.render_ids(given, tools=specs, add_generation_prompt=True)
    except (ValueError, TypeError, KeyError):
        ids = None
    expected: list[int] | None = _written(tokenizer, messages, tools)
    return bool(expected == ids)


def _goes_on(
    tokenizer: ChatTokenizer,
    renderer: Any,
    conversation: tuple[Messages, Messages, Messages],
    tools: Specs,
) -> bool:
    """Returns whether the renderer's tokens for the messages after a completion equal the
    template's. Also True if the renderer returns no tokens, or the template rewrites earlier text.
    `conversation`: the messages before the completion, all messages, and the messages after the
    completion.
    """
    before, whole, messages = conversation
    first, second = (_written(tokenizer, each, tools) for each in (before, whole))
    if first is None or second is None or second[: len(first)] != first:
        return True
    ends = {*renderer.get_stop_token_ids(), *tokenizer.stop_ids}
    stop = next((at for at in range(len(first), len(second)) if second[at] in ends), None)
    if stop is None:
        return True
    specs = [dict(each) for each in tools] or None
    completion = second[len(first) : stop + 1]
    found = renderer.bridge_to_next_turn(first, completion, messages, tools=specs)
    return found is None or list(found.token_ids) == second
