"""Folders of tokenizers in the chat formats of model families, to hold conversations in.

The templates were written for these tests, after the formats; where the renderers library has a
renderer of a format, tests compare the two token by token. Tokenizers are of bytes, with a few
merges, so that a text can be sampled in pieces that it would not be encoded to.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rftmega.data.tokenizer import Chat
from rftmega.data.tokenizer import Tokenizer as Ours

MERGES = [("b", "c"), ("a", "b"), ("c", "d")]  # "abcd" is a bc d, and may be sampled as ab cd
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TEMPLATES = Path(__file__).parent / "chat_templates"
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TOOL_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK_WORDS = ("<think>", "</think>")
DS = tuple(
    f"<｜{word}｜>"
    for word in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"),
        *(f"tool▁{part}▁{side}" for part in ("calls", "call") for side in ("begin", "end")),
        *(f"tool▁{part}▁{side}" for part in ("outputs", "output") for side in ("begin", "end")),
    )
)
GLM_VOCABULARY = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def template(name: str) -> str:
    """Returns a template of tests/chat_templates."""
    return (TEMPLATES / f"{name}.jinja").read_text().rstrip("\n")


@dataclass(frozen=True)
class Format:
    """How a family writes a conversation; the first of `ends` is the tokenizer's."""

    template: str
    special: Sequence[str]
    ends: Sequence[str]
    model_type: str = ""
    call: str = ""  # an answer that calls add(a=1), its end included
    final: str = "4<|im_end|>"  # an answer to the tool's reply 4
    tool_delta: str = ""  # what stands between the call and what the model says to the reply
    library: str = "template"  # which renderer is taken
    bos: str = ""  # that the tokenizer puts before plain text; "": none


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES_DELTA = (
    "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
FORMATS = {
    "qwen3": Format(
        template("qwen3"),
        (*IM, *TOOL_WORDS, *THINK_WORDS),
        ("<|im_end|>", "<|endoftext|>"),
        "qwen3",
        f"<think>\nI add.\n</think>\n\n{HERMES_CALL}<|im_end|>",
        "<think>\nFour.\n</think>\n\n4<|im_end|>",
        HERMES_DELTA,
        "qwen3",
    ),
    "glm": Format(
        template("glm"),
        (
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            *("<|endoftext|>", *TOOL_WORDS, *THINK_WORDS, *GLM_VOCABULARY),
        ),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "glm4_moe",
        "\n<think>I add.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
        "\n<think>Four.</think>\n4<|user|>",
        "\n<tool_response>\n4\n</tool_response><|assistant|>",
        "glm-4.5",
    ),
    "deepseek": Format(
        template("deepseek"),
        DS,
        ("<｜end▁of▁sentence｜>",),
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "4<｜end▁of▁sentence｜>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "deepseek-v3",
    ),
    "llama": Format(
        template("llama"),
        (
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            *("<|end_of_text|>", "<|eom_id|>"),
        ),
        ("<|eot_id|>",),
        "llama",
        '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
        "4<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        "llama-3",
    ),
    "gpt-oss": Format(
        template("harmony"),
        (
            *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
            "<|constrain|>",
        ),
        ("<|return|>",),
        "",
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
        '<|message|>{"a": 1}<|call|>',
        "<|channel|>final<|message|>4<|return|>",
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant',
    ),
    "mistral": Format(
        template("mistral"),
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
            *("[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ),
        ("</s>",),
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "call00000"}]</s>',
        " 4</s>",
        '[TOOL_RESULTS] {"content": "4", "call_id": "call00000"}[/TOOL_RESULTS]',
    ),
    "hermes": Format(
        template("hermes"),
        IM,
        ("<|im_end|>",),
        "llama",
        f"{HERMES_CALL}<|im_end|>",
        tool_delta=HERMES_DELTA,
    ),
    "qwen3 without its table": Format(
        template("qwen3"),
        (*IM, *TOOL_WORDS, *THINK_WORDS),
        ("<|im_end|>",),
        "",
        f"<think>\nI add.\n</think>\n\n{HERMES_CALL}<|im_end|>",
        "<think>\nFour.\n</think>\n\n4<|im_end|>",
        HERMES_DELTA,
    ),
}
PLAIN = {
    "chatml": Format(template("chatml"), IM, ("<|im_end|>",)),
    "phi": Format(
        template("phi"),
        ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
        ("<|end|>",),
        final="4<|end|>",
    ),
    "r1": Format(
        template("r1"),
        (*DS, *THINK_WORDS),
        ("<｜end▁of▁sentence｜>",),
        final="Hm.\n</think>\n\n4<｜end▁of▁sentence｜>",
    ),
    "counts": Format(template("counts"), IM, ("<|im_end|>",)),
}
MORE = {  # formats of which only the rendering is compared
    "gemma": Format(
        template("gemma"),
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>",),
        bos="<bos>",
    ),
    "llama 2": Format(template("llama2"), ("<s>", "</s>"), ("</s>",), bos="<s>"),
    "phi-4": Format(template("phi4"), (*IM, "<|im_sep|>"), ("<|im_end|>",)),
    "zephyr": Format(template("zephyr"), ("<s>", "</s>"), ("</s>",), bos="<s>"),
    "granite": Format(
        template("granite"),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        ("<|end_of_text|>",),
    ),
    "command": Format(
        template("command"),
        (
            *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|SYSTEM_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        ),
        ("<|END_OF_TURN_TOKEN|>",),
        bos="<BOS_TOKEN>",
    ),
    "parts": Format(
        template("parts"), (*IM, "<end_of_utterance>", "<image>"), ("<end_of_utterance>",)
    ),
    "thinks": Format(template("thinks"), (*IM, *THINK_WORDS), ("<|im_end|>",)),
}


def folder(path: Path, form: Format) -> Path:
    """Writes a tokenizer of bytes with the format's special tokens and its template."""
    path.mkdir(parents=True, exist_ok=True)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*characters, *("".join(pair) for pair in MERGES)]
    inner = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(each, normalized=False) for each in form.special])
    names = {"eos_token": form.ends[0]} | ({"bos_token": form.bos} if form.bos else {})
    if form.bos:
        number = inner.token_to_id(form.bos)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{form.bos} $A", special_tokens=[(form.bos, number)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    fast.chat_template = form.template
    fast.save_pretrained(path)
    ends: list[Any] = [fast.convert_tokens_to_ids(each) for each in form.ends]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if form.model_type:
        (path / "config.json").write_text(
            json.dumps({"model_type": form.model_type, "vocab_size": len(fast)})
        )
    return path


def tokenizer(path: Path, form: Format, **chat: Any) -> Ours:
    """Returns the project's tokenizer of such a folder."""
    return Ours(folder(path, form), chat=Chat(**chat))
