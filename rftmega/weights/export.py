"""The policy as a Hugging Face folder that `transformers` and vLLM load."""

import shutil
from pathlib import Path

from converters.hf_folder import copy_companions, shards_of, write_index, write_shard
from rftmega.weights.gather import Exporter

SHARD_BYTES = 4 * 2**30


def export_hf_folder(exporter: Exporter, source: str | Path, target: str | Path, *, write: bool) -> None:
    """Writes weights in safetensors shards with an index, and `source`'s config and tokenizer files, to `target`.

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
    if target.exists():
        shutil.rmtree(target)
    draft.rename(target)
