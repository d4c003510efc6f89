"""Checks a model's folder on a CPU before a run, and names the cause of each problem.

    rftmega check Qwen/Qwen3-0.6B                    a model of the Hub, or a folder
    rftmega check MODEL_FOLDER --backend fsdp        only this backend (both)
    rftmega check MODEL_FOLDER --layers 4            only the first 4 layers
    rftmega check MODEL_FOLDER --json check.json     also writes the findings to a file

Checks, in this order:
  config          this package reads config.json: architecture, parameters; a field that it refuses is named
  weights         no file is cut off, no tensor is missing or left over, tied embeddings have no other head
  tokenizer       text comes back unchanged; no token is outside the embedding
  special tokens  BOS, EOS and padding; BOS is not there twice
  chat template   generation prompt; several turns, system messages, tools, reasoning
  stop tokens     tokenizer, config.json and generation_config.json agree; the end of a turn is one of them
  logits          transformers' logits are finite; the probability of English text
  log-probs       each backend's log-probs of random tokens against transformers', in float32
  packing         rows packed into one micro-batch against single rows
  export          the exported folder's tensors against the folder's, or its logits in transformers
  generation      whether a greedy completion stops

A model of more than a billion parameters is checked with a temporary copy of its first layers, as many as
it takes to have one of each kind. Only their tensors are read. The copy is written to TMPDIR.

A note is no problem: only some runs must know of it. The exit code is 0 without problems, 1 with
problems, 2 if there is nothing to check.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.config.capabilities import BACKENDS
from rftmega.core.errors import ConfigError, exit_code_of


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder, or model of the Hub")
    parser.add_argument("--backend", choices=list(BACKENDS), help="check only this one (both)")
    parser.add_argument(
        "--layers",
        type=positive_number,
        metavar="N",
        help="check the first N layers (all of a small model, few of a large one)",
    )
    parser.add_argument(
        "--tokens", type=positive_number, default=64, metavar="N", help="of the completion (64)"
    )
    parser.add_argument(
        "--ignore-config-fields",
        type=lambda text: text.split(","),
        default=[],
        metavar="A,B",
        help="as model.ignore_config_fields of a run",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to a file")
    return exit_code_of(check, parser.parse_args(given))


def positive_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def check(chosen: argparse.Namespace) -> int:
    """Checks the model and prints the findings. Returns the exit code."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    from rftmega.run import api

    api.prepare(logs=sys.stderr)
    folder = _folder(chosen.model)
    if chosen.json is not None and not chosen.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {chosen.json}: there is no such folder.")
    import rftmega.runtime.device.before_megatron  # noqa: F401

    # isort: split
    from rftmega.models.known_fields import ignore
    from rftmega.run.model_check.check import ModelCheck
    from rftmega.run.model_check.findings import table

    logging.getLogger("rftmega.runtime").setLevel(logging.WARNING)
    ignore(chosen.ignore_config_fields)
    asked = [chosen.backend] if chosen.backend else []
    model = ModelCheck(
        folder,
        backends=asked or list(BACKENDS),
        asked=asked,
        layers=chosen.layers,
        tokens=chosen.tokens,
        ignored=chosen.ignore_config_fields,
    )
    with api.quiet_imports():
        findings = model.run()
    sys.stdout.write(table(findings))
    if chosen.json is not None:
        _write(chosen, model.kept, findings)
    return int(any(each.state == "problem" for each in findings))


def _folder(model: str) -> Path:
    """Returns the folder of a model, which is downloaded if `model` names one of the Hub.

    Raises ConfigError if there is no model.
    """
    from rftmega.config import DataConfig, ModelConfig, RunConfig
    from rftmega.run.hub import fetched

    config = RunConfig(model=ModelConfig(path=model), data=DataConfig(train="none.jsonl"))
    folder = Path(fetched(config).model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"{model} is no folder. Give a Hugging Face folder, or a model of the Hub (org/name)."
        )
    if not os.path.lexists(folder / "config.json"):
        raise ConfigError(
            f"{model} holds no config.json, so it is not a Hugging Face model folder. Of a run's checkpoint, make one with "
            "rftmega convert to-hf."
        )
    return folder


def _write(chosen: argparse.Namespace, layers: int, findings: Sequence[Any]) -> None:
    content = {
        "model": chosen.model,
        "layers": layers,
        "checks": [each._asdict() for each in findings],
    }
    try:
        chosen.json.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {chosen.json} can't be written: {error.strerror}.") from error


if __name__ == "__main__":
    sys.exit(main())
