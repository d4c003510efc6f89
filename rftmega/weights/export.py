"""The policy as a Hugging Face folder that `transformers` and vLLM load."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rftmega.weights.gather import Exporter

SHARD_BYTES = 4 * 2**30
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}  # of the model that was started from


def export_hf_folder(exporter: Exporter, source: str | Path, target: str | Path, *, write: bool) -> None:
    """Writes weights in safetensors shards with an index, and `source`'s config and tokenizer files, to `target`.

    Every process calls it; the one with `write` puts the files down, into a folder that gets its name only when it is
    complete, so that `target` is never half-written.
    """
    source, target = Path(source), Path(target)
    draft = target.with_name(target.name + ".incomplete")
    writer = _ShardWriter(draft) if write else None
    for name, tensor in exporter:
        if writer:
            writer.add(name, tensor)
    if writer is None:
        return
    writer.close()
    for path in source.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(".index.json"):
            shutil.copy2(path, draft / path.name)
    if target.exists():
        shutil.rmtree(target)
    draft.rename(target)


class _ShardWriter:
    def __init__(self, folder: Path):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.file_of: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if self.pending_bytes + tensor.nbytes > SHARD_BYTES and self.pending:
            self._flush()
        self.pending[name] = tensor.to("cpu", copy=True).contiguous()
        self.pending_bytes += tensor.nbytes

    def close(self) -> None:
        self._flush()
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.file_of}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        file = f"model-{len(set(self.file_of.values())) + 1:05d}.safetensors"
        save_file(self.pending, self.folder / file, metadata={"format": "pt"})
        self.file_of |= dict.fromkeys(self.pending, file)
        self.total_bytes += self.pending_bytes
        self.pending, self.pending_bytes = {}, 0
