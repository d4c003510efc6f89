"""Builds tiny models that call a tool, without training any.

A table says which tokens may follow a token. The head has large weights for these, and small random
ones beside, so which of them follows depends on the whole context.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests import chat_formats
from tests.tiny_models import save_tiny

MARGIN = 25.0  # of the logits of what may follow, over those of all else
NOISE = 1.0  # of logits, by the context
FORM = chat_formats.FORMATS["qwen3"]
END = FORM.ends[0]
HEAD = '\n{"name": "add", "arguments": {"a": '
WRONG = HEAD.replace("add", "subtract")
TAIL = "}}\n"
DIGITS = "123456789"
Table = Mapping[str, Mapping[str, float]]  # token -> what may follow, and what its logit is more

# A line feed ends every context. Some calls are of no tool, and some are broken off.
TABLE: Table = {
    "\n": {"<tool_call>": 4.0, **dict.fromkeys(DIGITS[:3], 0.0)},
    "<tool_call>": {HEAD: 0.0, WRONG: -0.5},
    HEAD: dict.fromkeys(DIGITS, 0.0),
    WRONG: dict.fromkeys(DIGITS, 0.0),
    **dict.fromkeys(DIGITS, {TAIL: 1.5, END: 0.0, **dict.fromkeys(DIGITS, -1.5)}),
    TAIL: {"</tool_call>": 0.0},
    "</tool_call>": {END: 0.0, "<tool_call>": -1.5},
}


def talkative(words: int) -> tuple[Table, list[str]]:
    """Returns the table of a model that says so many words and calls add(1), whatever it is told,
    and the words.
    """
    said = [f" word{number}" for number in range(words)]
    chain = ["\n", *said, "<tool_call>", HEAD, "1", TAIL, "</tool_call>", END]
    pairs = zip(chain, chain[1:], strict=False)
    return {token: {follows: 0.0} for token, follows in pairs}, said


def save_calling(
    folder: Path, table: Table = TABLE, words: Sequence[str] = (), **changes: Any
) -> Path:
    """Writes a folder of a Qwen3 and its tokenizer. `words` are further tokens of the table."""
    chat_formats.folder(folder, FORM)
    tokens = AutoTokenizer.from_pretrained(folder)
    tokens.add_tokens([AddedToken(word, normalized=False) for word in (HEAD, WRONG, TAIL, *words)])
    tokens.save_pretrained(folder)
    ended = (folder / "generation_config.json").read_text()
    size = {"vocab_size": len(tokens), "hidden_size": 128, "max_position_embeddings": 2048}
    save_tiny(folder, "qwen3", **(size | changes))
    (folder / "generation_config.json").write_text(ended)
    _write_table(folder, table, tokens)
    return folder


def _write_table(folder: Path, table: Table, tokens: PreTrainedTokenizerFast) -> None:
    """Makes the folder's model say what the table allows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size, width = model.model.embed_tokens.weight.shape
    torch.manual_seed(1)
    words = torch.nn.functional.normalize(torch.randn(size, width), dim=1)
    head = NOISE * torch.randn(size, width) / width**0.5
    for token, following in table.items():
        (number,) = tokens.encode(token, add_special_tokens=False)
        for follows, more in following.items():
            (next_one,) = tokens.encode(follows, add_special_tokens=False)
            head[next_one] += (MARGIN + more) * words[number] / width**0.5
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(words)
        model.lm_head.weight.copy_(head)
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:  # as large as what a token brings, and no larger
            for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
                matrix.weight.mul_(0.02)
    model.save_pretrained(folder)
