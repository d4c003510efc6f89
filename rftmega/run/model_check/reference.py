"""The reference: logits that transformers computes with a folder, one row at a time."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.core.json_files import read_json_object
from rftmega.model_providers.transformers_decoders import SEEING
from rftmega.models.rescaled_weights import without_rescaling
from rftmega.run.model_check.findings import Finding, note, ok, problem, skipped

SAID = (
    "The capital of France is Paris, and the capital of Italy is Rome. Water freezes at zero degrees, "
    "and a week has seven days."
)
ASKED = "What is 2+3?"
UNIFORM = 0.5  # nats by which text must be likelier than if all tokens were equally likely


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides messages and progress bars of transformers within a `with` block."""
    from transformers.utils import logging as of_transformers

    before = of_transformers.get_verbosity()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        of_transformers.set_verbosity(before)
        of_transformers.enable_progress_bar()


def class_of(folder: Path) -> Any:
    """Returns transformers' class that builds the folder's model, or None if it has none."""
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = read_json_object(folder / "config.json").get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    if kind in SEEING:
        return AutoModelForImageTextToText
    text = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if text else AutoModelForMultimodalLM


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' model of a folder in float32, and its report of the load."""
    from transformers import AutoConfig

    kind = class_of(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # transformers' own default; in 5.19 its eager attention adds Falcon's alibi twice
    model, told = kind.from_pretrained(
        folder,
        config=without_rescaling(config),  # as in a run
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
    )
    return model.eval(), told


@torch.no_grad()
def logits_of(model: Any, row: Tensor) -> Tensor:
    """Returns the logits [T, V] of a row of token ids [T]."""
    found: Tensor = model(input_ids=row[None], use_cache=False).logits[0].float()
    return found


def of_logits(logits: Sequence[Tensor], config: dict[str, Any]) -> Iterator[Finding]:
    """Yields the findings about the logits of random rows. `config`: config.json, flattened."""
    largest = max(float(each.abs().max()) for each in logits)
    if not math.isfinite(largest):
        yield problem(
            "logits",
            "transformers computes NaN or infinite logits with these weights.",
            "Download the weights again, or take an earlier export.",
        )
        return
    spread = float(torch.cat([each.std(-1) for each in logits]).mean())
    said = f"finite, at most {largest:.3g} in size, standard deviation {spread:.3g} over the vocabulary"
    if spread < 1e-6:
        yield problem(
            "logits",
            "All tokens are equally likely: the output head or the last norm is zero.",
            "Download the weights again.",
        )
        return
    cap = config.get("final_logit_softcapping")
    if isinstance(cap, int | float) and cap and largest > cap * 1.001:
        yield problem(
            "logits",
            f"final_logit_softcapping={cap}, and transformers computes logits up to {largest:.3g}: they are not capped.",
            "Update transformers, or remove the field if the model was trained without it.",
        )
        return
    yield ok("logits", said)


def uneven(model: Any, rows: Sequence[Tensor], logits: Sequence[Tensor]) -> float:
    """Returns by how much the log-probs of a row's first tokens change with the tokens after them.
    The first 1/4, 2/4 and 3/4 of each row are computed alone, and compared with the same tokens in
    the `logits` [T, V] of the whole row. The result is the largest difference.
    """
    found = 0.0
    for row, whole in zip(rows, logits, strict=True):
        for part in {len(row) // 4, len(row) // 2, len(row) * 3 // 4} - {0}:
            alone = logits_of(model, row[:part]).log_softmax(-1)
            found = max(found, float((alone - whole[:part].log_softmax(-1)).abs().max()))
    return found


def of_uneven(difference: float) -> Finding:
    """Returns the problem for a `difference`, computed by `uneven`, that exceeds rounding errors."""
    return problem(
        "logits",
        f"Transformers' own log-probs of a row's first tokens change by up to {difference:.1e} with the tokens that follow: "
        "experts, or tokens to attend to, that have equal scores are chosen otherwise (weights that were hardly trained have "
        "many), or tokens see later ones. A run would stop at the gap between engine and trainer.",
        "Take trained weights if these are random; otherwise another model.",
    )


def of_prediction(model: Any, tokenizer: Any) -> Finding:
    """Returns a finding about the probability of English text under the whole model."""
    given = tokenizer.encode(SAID, chat_template=False)
    if len(given) < 2:  # of a vocabulary for one task
        return skipped("prediction", "the tokenizer has no tokens for English text")
    ids = torch.tensor(given)
    logits = logits_of(model, ids)[:-1]
    found = float(logits.log_softmax(-1).gather(-1, ids[1:, None]).mean())
    uniform = -math.log(logits.shape[-1])
    said = f"English text has a mean log-prob of {found:.2f} per token; all tokens alike would have {uniform:.2f}"
    if found < uniform + UNIFORM:
        return note(
            "prediction",
            f"{said}. The weights predict nothing: are they random, or of another tokenizer?",
        )
    return ok("prediction", said)


@torch.no_grad()
def of_generation(model: Any, tokenizer: Any, most: int, *, positions: int) -> Finding:
    """Returns a finding about one greedy completion of at most `most` tokens, by a model that knows
    `positions` positions.
    """
    chat = bool(tokenizer.inner.chat_template)
    prompt = tokenizer.encode(ASKED, chat_template=chat)
    if not prompt:
        return skipped("generation", f"the tokenizer has no tokens for {ASKED!r}")
    most = min(most, positions - len(prompt))
    if most < 1:
        return skipped("generation", f"its {positions} positions leave no room behind the prompt")
    try:
        found, how = _completed(model, prompt, tokenizer.stop_ids, most, use_cache=True), ""
    except Exception as error:  # of each class's own code for a cache
        found = _completed(model, prompt, tokenizer.stop_ids, most, use_cache=False)
        first = " ".join(str(error).split())[:200]
        how = f" (slowly, since transformers' cache fails for this model: {first})"
    text = tokenizer.decode(found)
    begin = repr(text if len(text) < 60 else text[:60] + "...")
    if found and found[-1] in tokenizer.stop_ids:
        return ok("generation", f"stops after {len(found)} tokens: {begin}{how}")
    return note("generation", f"no stop token within {most} tokens: {begin}{how}")


def _completed(
    model: Any, prompt: Sequence[int], stop_ids: Sequence[int], most: int, *, use_cache: bool
) -> list[int]:
    """Returns the likeliest completion of a prompt, of at most `most` tokens."""
    given = torch.tensor(prompt)[None]
    rows = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=most,
        do_sample=False,
        use_cache=use_cache,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
    )
    found: list[int] = rows[0, given.shape[1] :].tolist()
    return found
