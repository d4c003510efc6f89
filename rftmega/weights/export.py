"""The policy as a Hugging Face folder that `transformers` and vLLM load."""

import json
import shutil
from pathlib import Path

from converters.hf_folder import copy_companions, shards_of, write_index, write_shard
from rftmega.weights.gather import Exporter

SHARD_BYTES = 4 * 2**30


def export_hf_folder(
    exporter: Exporter, source: str | Path, target: str | Path, *, write: bool, classifier: bool = False
) -> None:
    """Writes weights in safetensors shards with an index, and `source`'s config and tokenizer files, to `target`.

    `classifier`: the weights are a value model's, which `transformers` calls a sequence classifier with one label.

    Every process calls it; the one with `write` puts the files down, into a folder that gets its name only when it is
    complete, so that `target` is never half-written.
    """
    tensors = iter(exporter)
    if not write:
        for _ in tensors:  # a collective
            pass
        return
    source, target = Path(source), Path(target)
    draft = target.with_name(target.name + ".incomplete")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    shards = shards_of(exporter.planned, SHARD_BYTES)
    for file, planned in shards.items():
        write_shard(draft / file, planned, tensors)
    write_index(draft, shards)
    copy_companions(source, draft)
    if classifier:
        _say_classifier(draft / "config.json")
    if target.exists():
        shutil.rmtree(target)
    draft.rename(target)


def _say_classifier(path: Path) -> None:
    config = json.loads(path.read_text())
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or []
    ]
    config |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}, "num_labels": 1}
    path.write_text(json.dumps(config, indent=2))
