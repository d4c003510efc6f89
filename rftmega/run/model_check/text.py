"""Checks a folder's tokenizer, special tokens, chat template and stop tokens."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rftmega.core.errors import CheckpointError, DataError, RFTMegaError
from rftmega.core.json_files import read_json_object
from rftmega.data.chat.template_bridge import REASONING_KEYS, TemplateBridge
from rftmega.data.chat.template_forms import Messages
from rftmega.data.tokenizer import Tokenizer
from rftmega.run.model_check.findings import Finding, note, ok, problem, raised, skipped

GENERATION = "generation_config.json"
# files of which one has the vocabulary
VOCABULARIES = (
    "tokenizer.json",
    "*.model",
    "vocab*",
    "*.tiktoken",
    "tekken.json",
    "tokenization*.py",
)
ASCII = "The sum of 2 and 3 is 5; is (x + 1)^2 > 0?\n\tYes."
OTHERS = ("Größe, élan, naïve", "日本語と中文", "x ≤ √2 ∧ 🙂")
ASKED, REPLIED, AGAIN, TOLD = "What is 2+3?", "The sum is 5.", "And 4+4?", "Be brief."
USER = {"role": "user", "content": ASKED}
ASSISTANT = {"role": "assistant", "content": REPLIED}
USER_AGAIN = {"role": "user", "content": AGAIN}
SYSTEM = {"role": "system", "content": TOLD}
THOUGHT = "Two and three."
# names of control tokens, such as <|im_end|> and <｜User｜>
CONTROL = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TEMPLATE = "Correct chat_template.jinja (or chat_template in tokenizer_config.json), or set data.chat_template_file."


def of_text(folder: Path, rows: int | None) -> tuple[list[Finding], Tokenizer | None]:
    """Returns the findings about tokenizer and chat template, and the tokenizer; None if it can't
    be loaded. `rows`: of the embedding; None if config.json can't be read.
    """
    rest = ("special tokens", "chat template", "turns", "stop tokens")
    try:
        tokenizer = _opened(folder)
    except Exception as error:
        found = raised("tokenizer", error)
        return [found, *(skipped(each, "no tokenizer") for each in rest)], None
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "tokenizer": lambda: _round_trip(tokenizer, rows),
        "special tokens": lambda: _special_tokens(tokenizer, rows),
        "chat template": lambda: _template(tokenizer),
        "stop tokens": lambda: _stop_tokens(folder, tokenizer),
    }
    return [each for name, check in checks.items() for each in _guarded(name, check)], tokenizer


def _opened(folder: Path) -> Tokenizer:
    """Returns the folder's tokenizer. Raises CheckpointError if there is none: transformers makes an
    empty one of a folder without a vocabulary.
    """
    if not any(path.is_file() for pattern in VOCABULARIES for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} holds no tokenizer. Copy tokenizer.json and tokenizer_config.json of the model into it."
        )
    return Tokenizer(folder)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Returns the findings of a check; an exception of foreign code is a problem."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(raised(name, error))
    return found


def _round_trip(tokenizer: Tokenizer, rows: int | None) -> Iterator[Finding]:
    inner = tokenizer.inner
    words = len(inner)
    if rows is not None and words > rows:
        names = [inner.convert_ids_to_tokens(each) for each in range(rows, min(words, rows + 3))]
        yield problem(
            "tokenizer",
            f"It has {words} tokens and the embedding {rows} rows: ids from {rows} on ({', '.join(map(str, names))}) have none.",
            "Take the model's own tokenizer, or enlarge embedding, head and vocab_size.",
        )
    changed = [text for text in (ASCII, *OTHERS) if _again(tokenizer, text) != text]
    said = f"{words} tokens" + (f", embedding of {rows} rows" if rows is not None else "")
    if changed:
        text = changed[0]
        yield note(
            "tokenizer",
            f"{said}; text does not come back unchanged: {text!r} becomes {_again(tokenizer, text)!r}.",
        )
    elif rows is None or words <= rows:
        yield ok("tokenizer", f"{said}; text comes back unchanged")


def _again(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.inner.encode(text, add_special_tokens=False))


def _special_tokens(tokenizer: Tokenizer, rows: int | None) -> Iterator[Finding]:
    inner = tokenizer.inner
    ids = {name: getattr(inner, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    said = ", ".join(f"{name} {_shown(tokenizer, each)}" for name, each in ids.items())
    strangers = [
        each for each in ids.values() if each is not None and rows is not None and each >= rows
    ]
    if strangers:
        yield problem(
            "special tokens",
            f"{_shown(tokenizer, strangers[0])} has no row in the embedding, which has {rows}.",
            "Correct special_tokens_map.json and tokenizer_config.json, or take the model's own tokenizer.",
        )
    if not strangers:
        yield ok("special tokens", said)
    if ids["pad"] is not None and ids["pad"] == ids["eos"]:
        yield note(
            "special tokens",
            "pad is eos. Rows are masked by their lengths here; other programs may leave eos out of the loss.",
        )
    yield from _bos(tokenizer, ids["bos"])


def _bos(tokenizer: Tokenizer, bos: int | None) -> Iterator[Finding]:
    """Yields a finding if a chat begins with BOS twice, or without the BOS that text begins with."""
    if bos is None or not _has_template(tokenizer):
        return
    try:
        chat = tokenizer.encode([USER], chat_template=True)
    except DataError:
        return
    if chat[:2] == (bos, bos):
        yield problem(
            "special tokens",
            f"A chat begins with {_shown(tokenizer, bos)} twice: the template writes it twice, or its encoding adds one.",
            TEMPLATE,
        )
    text = tokenizer.inner.encode("a")
    if text[:1] == [bos] and bos not in chat:
        yield note(
            "special tokens",
            f"Text begins with {_shown(tokenizer, bos)}, and a chat does not: the chat template writes no bos_token. A model "
            "that was trained with it predicts worse without.",
        )


def _has_template(tokenizer: Tokenizer) -> bool:
    return bool(tokenizer.inner.chat_template)


def _template(tokenizer: Tokenizer) -> Iterator[Finding]:
    if not _has_template(tokenizer):
        why = "no chat template: prompts are plain text, unless you set data.chat_template_file"
        yield from (skipped(each, why) for each in ("chat template", "turns"))
        return
    try:
        opened = tokenizer.template.text([USER], open_=True)
        closed = tokenizer.template.text([USER], open_=False)
    except RFTMegaError as error:
        yield problem(
            "chat template", f"It can't render one user message: {_reason(error)}.", TEMPLATE
        )
        yield skipped("turns", "the chat template fails")
        return
    lost = [text for text in (ASKED,) if text not in opened]
    if lost:
        yield problem("chat template", "It leaves the text of the user's message out.", TEMPLATE)
        yield skipped("turns", "the chat template leaves text out")
        return
    yield _generation_prompt(opened, closed)
    yield from _unknown_tokens(tokenizer, opened)
    yield from _same_tokens(tokenizer, opened)
    yield from _turns(tokenizer, opened)
    yield from _system(tokenizer)
    yield from _tools(tokenizer)
    yield from _reasoning(tokenizer)


def _reason(error: Exception) -> str:
    """Returns the part of an error's message that the chat template itself wrote."""
    return str(error).rpartition("can't take it: ")[2].rstrip(".")


def _generation_prompt(opened: str, closed: str) -> Finding:
    if not opened.startswith(closed):
        return problem(
            "chat template",
            "With add_generation_prompt=true it also changes the text before.",
            TEMPLATE,
        )
    if opened == closed and not closed.rstrip().endswith("]"):
        return note(
            "chat template",
            "add_generation_prompt has no effect: the model must begin the assistant's turn itself.",
        )
    header = opened[len(closed) :]
    return ok("chat template", f"the assistant's turn begins with {header!r}")


def _unknown_tokens(tokenizer: Tokenizer, text: str) -> Iterator[Finding]:
    """Yields a note for names of control tokens that the template writes and the tokenizer reads as
    letters.
    """
    if letters := _read_as_letters(tokenizer, text):
        yield note(
            "chat template",
            f"It writes {', '.join(letters[:3])}, which the tokenizer does not know as a token and splits into letters. Some "
            "models were trained so; others need the tokenizer and the template of the same model.",
        )


def _read_as_letters(tokenizer: Tokenizer, text: str) -> list[str]:
    names = dict.fromkeys(CONTROL.findall(text))
    return [name for name in names if len(tokenizer.encode_reply(name)) > 1]


def _same_tokens(tokenizer: Tokenizer, opened: str) -> Iterator[Finding]:
    """Yields a problem if transformers tokenizes the rendered chat otherwise."""
    ours = list(tokenizer.encode([USER], chat_template=True))
    theirs = tokenizer.inner.apply_chat_template(
        tokenizer.template.forms.adapted([USER]),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    if ours != list(theirs):
        yield problem(
            "chat template",
            f"Its text {opened[:60]!r} has {len(ours)} tokens here and {len(theirs)} in apply_chat_template.",
            "Report it with this folder's tokenizer.",
        )


def _turns(tokenizer: Tokenizer, opened: str) -> Iterator[Finding]:
    """Yields a finding about several turns: each rendering must begin with that of the turns
    before.
    """
    text = tokenizer.template.text
    try:
        one = text([USER, ASSISTANT], open_=False)
        several = text([USER, ASSISTANT, USER_AGAIN], open_=True)
    except RFTMegaError as error:
        yield problem("turns", f"The template refuses a second turn: {_reason(error)}.", TEMPLATE)
        return
    places = [several.find(each) for each in (ASKED, REPLIED, AGAIN)]
    if -1 in places:
        gone = ("first question", "response", "second question")[places.index(-1)]
        yield problem("turns", f"The template leaves the {gone} of two turns out.", TEMPLATE)
    elif places != sorted(places):
        yield problem("turns", "The template renders the turns in another order.", TEMPLATE)
    elif not one.startswith(opened):
        yield note(
            "turns",
            f"A response does not follow the prompt as it was generated from: {_difference(opened, one)}. Supervised examples "
            "are refused, and each turn of a rollout begins a new trajectory.",
            "Set data.chat_template_file to a template that continues the prompt.",
        )
    elif not several.startswith(_body(one)):
        yield note(
            "turns",
            f"The template rewrites earlier turns: {_difference(one, several)}. Each turn of a rollout then begins a new "
            "trajectory, which costs time.",
        )
    else:
        yield ok("turns", "each rendering begins with that of the turns before")


def _body(text: str) -> str:
    """Returns a rendering without line feeds at its end, which a template may write only there."""
    return text.rstrip("\n")


def _difference(one: str, other: str) -> str:
    """Returns where two texts part, as a phrase."""
    common = len(os.path.commonprefix([one, other]))
    return f"{one[common : common + 30]!r} becomes {other[common : common + 30]!r}"


def _system(tokenizer: Tokenizer) -> Iterator[Finding]:
    try:
        found = tokenizer.template.text([SYSTEM, USER], open_=True)
    except RFTMegaError as error:
        yield note(
            "system",
            f"The template refuses a system message, so leave data.system_prompt out: {_reason(error)}.",
        )
        return
    if TOLD not in found:
        yield problem("system", "The template silently leaves system messages out.", TEMPLATE)
    elif found.find(TOLD) > found.find(ASKED):
        yield problem(
            "system", "The template writes the system message behind the user's.", TEMPLATE
        )
    else:
        yield ok("system", "system messages are rendered")


def _tools(tokenizer: Tokenizer) -> Iterator[Finding]:
    if not tokenizer.template.reads_tools:
        yield note(
            "tools", "The template renders no tools: environment.type=tools needs another one."
        )
        return
    call = {
        "type": "function",
        "id": "call00000",
        "function": {"name": "add", "arguments": {"a": 1}},
    }
    messages: Messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Result 4711", "tool_call_id": "call00000", "name": "add"},
    ]
    try:
        found = tokenizer.template.text(messages, open_=True, tools=[TOOL])
    except RFTMegaError as error:
        yield problem(
            "tools",
            f"It renders tools and refuses a call with its result: {_reason(error)}.",
            TEMPLATE,
        )
        return
    if "4711" not in found:
        yield problem("tools", "It renders tools and leaves their results out.", TEMPLATE)
    else:
        yield ok("tools", "tools, calls and results are rendered")


def _reasoning(tokenizer: Tokenizer) -> Iterator[Finding]:
    bridge = TemplateBridge(tokenizer)
    inline = f"<think>\n{THOUGHT}\n</think>\n\n{REPLIED}"
    key = bridge.reasoning_key
    thought = {**ASSISTANT, key: THOUGHT} if key else {**ASSISTANT, "content": inline}
    try:
        found = tokenizer.template.text([USER, thought, USER_AGAIN], open_=True)
    except RFTMegaError:
        return
    if THOUGHT not in found:
        yield note(
            "reasoning",
            "The template drops reasoning of earlier turns: each turn of a rollout begins a new trajectory.",
        )
    elif key in REASONING_KEYS:
        yield ok("reasoning", f"kept in earlier turns (field {key} of messages)")


def _stop_tokens(folder: Path, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Yields findings about the tokens that end a completion: those that the tokenizer, config.json
    and generation_config.json name, and the end of a turn in the chat template.
    """
    own = tokenizer.inner.eos_token_id
    config = _stops_in(folder / "config.json")
    generation = _stops_in(folder / GENERATION)
    found = list(_disagreement(tokenizer, own, generation, config))
    turn = _turn(tokenizer) if _has_template(tokenizer) else None
    end = None if turn is None else _end_of(tokenizer, turn)
    if end is not None and end not in tokenizer.stop_ids:
        found.append(
            problem(
                "stop tokens",
                f"The chat template ends a turn with {_shown(tokenizer, end)}, which is not among the stop tokens "
                f"({_listed(tokenizer, tokenizer.stop_ids)}): completions would run on to rollout.max_response_tokens.",
                f"Add {end} to eos_token_id in {GENERATION}.",
            )
        )
    if turn is not None and end is None:
        letters = _read_as_letters(tokenizer, turn.rpartition(REPLIED)[2])
        found.append(
            problem(
                "stop tokens",
                f"The chat template ends a turn with {letters[0]}, which the tokenizer splits into letters: no completion "
                "stops there.",
                "Take the tokenizer and the template of the same model.",
            )
            if letters
            else note("stop tokens", "The chat template writes no special token behind a response.")
        )
    yield from found
    if not any(each.state == "problem" for each in found):
        yield ok("stop tokens", _listed(tokenizer, tokenizer.stop_ids))


def _disagreement(
    tokenizer: Tokenizer, own: int | None, generation: Sequence[int], config: Sequence[int]
) -> Iterator[Finding]:
    if own is not None and generation and own not in generation:
        yield problem(
            "stop tokens",
            f"The tokenizer's eos_token is {_shown(tokenizer, own)}, and {GENERATION} stops at "
            f"{_listed(tokenizer, generation)} only.",
            f"Add {own} to eos_token_id in {GENERATION}, or correct eos_token in tokenizer_config.json.",
        )
    stops = {*generation, *([] if own is None else [own])}
    strange = [each for each in config if each not in stops]
    if strange and not stops & set(config):
        yield problem(
            "stop tokens",
            f"config.json stops at {_listed(tokenizer, config)}, and the tokenizer and {GENERATION} at "
            f"{_listed(tokenizer, sorted(stops))}. Engines and this trainer read the latter.",
            "Correct eos_token_id in config.json, or eos_token in tokenizer_config.json.",
        )
    elif strange:
        yield note(
            "stop tokens",
            f"config.json also names {_listed(tokenizer, strange)}, at which completions do not stop.",
            f"Add the ids to eos_token_id in {GENERATION} if they end a response.",
        )


def _stops_in(path: Path) -> list[int]:
    """Returns the eos_token_id of a JSON file as a list; [] if the file names none."""
    if not path.is_file():
        return []
    fields = read_json_object(path)
    text = fields.get("text_config")
    nested = text.get("eos_token_id") if isinstance(text, dict) else None
    found = fields.get("eos_token_id", nested)
    every = found if isinstance(found, list) else [found]
    return [each for each in every if isinstance(each, int)]


def _turn(tokenizer: Tokenizer) -> str | None:
    """Returns the text of a question and its response; None if the template renders none."""
    try:
        text = tokenizer.template.text([USER, ASSISTANT], open_=False)
    except RFTMegaError:
        return None
    return text if REPLIED in text else None


def _end_of(tokenizer: Tokenizer, turn: str) -> int | None:
    """Returns the first special token behind the response in a turn; None if there is none."""
    behind = tokenizer.encode_behind(REPLIED, turn.rpartition(REPLIED)[2])
    special = {*tokenizer.inner.added_tokens_decoder, *tokenizer.inner.all_special_ids}
    return next((each for each in behind if each in special), None)


def _shown(tokenizer: Tokenizer, number: Any) -> str:
    if number is None:
        return "none"
    if not 0 <= number < len(tokenizer.inner):
        return f"{number}, which is no token"
    return f"{tokenizer.inner.convert_ids_to_tokens(number)} ({number})"


def _listed(tokenizer: Tokenizer, numbers: Sequence[int]) -> str:
    return ", ".join(_shown(tokenizer, each) for each in numbers)
