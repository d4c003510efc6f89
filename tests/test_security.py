"""What is loaded is never run, and what listens is not open to everybody."""

import ast
import hashlib
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.core.errors import CheckpointError

ROOT = Path(__file__).parents[1]
PROGRAM = ("rftmega", "model_providers", "converters", "tools", "train_rl.py")
RUNS_CODE = {  # calls that run what they read
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "dill.load",
        "dill.loads",
        "joblib.load",
        "marshal.loads",
        "shelve.open",
    ),
    *(
        "yaml.load",
        "yaml.unsafe_load",
        "eval",
        "exec",
        "os.system",
        "numpy.load",
        "np.load",
        "torch.hub.load",
    ),
}
# whose whole task is to run an answer, in a jail of its own
ON_PURPOSE = {
    "rftmega/sandbox/program.py": {"exec"},
    "rftmega/sandbox/interpreter.py": {"exec", "eval"},
}
LISTENS = (
    "bind",
    "create_server",
    "listen",
    "HTTPServer",
    "ThreadingHTTPServer",
    "TCPServer",
    "start_http_server",
    "TCPStore",
)


def files(root: Path) -> Iterator[Path]:
    for name in PROGRAM:
        yield from [root / name] if name.endswith(".py") else sorted((root / name).rglob("*.py"))


def complaints(root: Path) -> list[str]:
    """file:line: what, of every call that loads by running, trusts remote code, or listens to more
    than this host.
    """
    found = []
    for path in files(root):
        if not path.is_file():
            continue
        place = str(path.relative_to(root))
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
                found.append(f"{place}:{node.lineno}: {node.value!r}: every interface")
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "trust-remote-code" in node.value
            ):
                found.append(f"{place}:{node.lineno}: {node.value!r}")
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            at = f"{place}:{node.lineno}: {name}"
            if name in RUNS_CODE - ON_PURPOSE.get(place, set()):
                found.append(f"{at}: runs what it reads")
            if (
                name == "torch.load"
                and ast.unparse(given.get("weights_only", ast.Constant(False))) != "True"
            ):
                found.append(f"{at} without weights_only=True")
            if name.endswith(".from_pretrained") or name.endswith(".from_config"):
                trusts = given.get("trust_remote_code")
                if trusts is None or ast.unparse(trusts) not in ("False", "trust_remote_code"):
                    found.append(
                        f"{at} without trust_remote_code=False: transformers would ask, or trust"
                    )
            elif "trust_remote_code" in given and ast.unparse(given["trust_remote_code"]) == "True":
                found.append(f"{at} trusts remote code")
            if name.split(".")[-1] in LISTENS and _address(node, given) == "":
                found.append(f"{at}: every interface")
    return found


def _address(call: ast.Call, given: dict[str | None, ast.expr]) -> str | None:
    """The literal address that a call listens at; None where it is computed, "" where it is left
    out or empty.
    """
    value = given.get("addr") or given.get("host")
    # whose first argument is the port
    if value is None and ast.unparse(call.func).endswith("start_http_server"):
        return ""
    value = value or (call.args[0] if call.args else None)
    if isinstance(value, ast.Tuple) and value.elts:
        value = value.elts[0]
    return (
        str(value.value)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
        else None
    )


def test_nothing_is_loaded_by_running_it_and_nothing_listens_everywhere() -> None:
    assert complaints(ROOT) == []


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import torch\ntorch.load('f')", "torch.load without weights_only=True"),
        (
            "import torch\ntorch.load('f', weights_only=False)",
            "torch.load without weights_only=True",
        ),
        ("import pickle\npickle.load(f)", "pickle.load: runs what it reads"),
        ("import yaml\nyaml.load(f)", "yaml.load: runs what it reads"),
        ("eval('1')", "eval: runs what it reads"),
        ("AutoTokenizer.from_pretrained('f')", "from_pretrained without trust_remote_code=False"),
        (
            "AutoTokenizer.from_pretrained('f', trust_remote_code=True)",
            "from_pretrained without trust_remote_code=False",
        ),
        ("LLM(model='f', trust_remote_code=True)", "LLM trusts remote code"),
        ("flags = ['--trust-remote-code']", "'--trust-remote-code'"),
        ("s.bind(('', 0))", "s.bind: every interface"),
        ("s.bind(('0.0.0.0', 0))", "'0.0.0.0': every interface"),
        ("HTTPServer(('', 80), H)", "HTTPServer: every interface"),
        ("start_http_server(9000)", "start_http_server: every interface"),
    ],
)
def test_a_planted_hole_is_found(code: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "rftmega").mkdir()
    (tmp_path / "rftmega/bad.py").write_text(code)
    found = complaints(tmp_path)
    assert any(complaint in text for text in found), found


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, sprung: Path):
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sprung),)


def test_a_trap_springs_where_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()


def test_pickles_in_a_checkpoint_are_not_run(tmp_path: Path) -> None:
    """In torch's metadata, which Megatron would unpickle, in the part for Megatron's own state, and
    in place of a tensor.
    """
    import rftmega.runtime.device.before_megatron  # noqa: F401

    # isort: split
    from rftmega.checkpoints.distributed import finish, write_manifest, write_pieces
    from rftmega.checkpoints.reader import Reader, read_manifest

    folder, sprung = tmp_path / "checkpoint", tmp_path / "sprung"
    folder.mkdir()
    stored = write_pieces(folder / "a.distcp", [("a", (0,), torch.arange(4.0))])
    finish(folder, stored, {"a": (4,)}, [], {"layout": ""})
    trap = pickle.dumps(Trap(sprung))
    manifest = read_manifest(folder)
    for name in (".metadata", "common.pt", "__objects.distcp"):
        (folder / name).write_bytes(trap)
        # whoever sets a trap can count, too
        manifest["files"][name] = hashlib.sha256(trap).hexdigest()
    write_manifest(folder, manifest)
    target = torch.zeros(4)
    Reader(folder).fill(target, "a", (0,))
    assert target.tolist() == [0, 1, 2, 3]
    piece = folder / "a.distcp"
    piece.write_bytes(trap.ljust(piece.stat().st_size, b"."))
    with pytest.raises(CheckpointError):
        Reader(folder).fill(target, "a", (0,))
    assert not sprung.exists()


CODE = """
from pathlib import Path
Path({sprung!r}).mkdir()
from transformers import PreTrainedTokenizerFast
class Mine(PreTrainedTokenizerFast): ...
"""


def folder_with_code(folder: Path, sprung: Path) -> Path:
    """A tokenizer that is a Python file beside it."""
    import sys

    sys.path.insert(0, str(ROOT / "examples/arithmetic"))
    import warm_start

    warm_start.tokenizer().save_pretrained(folder)
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    saved |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(saved))
    (folder / "mine.py").write_text(CODE.format(sprung=str(sprung)))
    return folder


def test_a_tokenizers_own_code_runs_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rftmega.data.tokenizer import Tokenizer

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    sprung = tmp_path / "sprung"
    folder = folder_with_code(tmp_path / "tokenizer", sprung)
    with pytest.raises(CheckpointError, match="model.trust_remote_code"):
        Tokenizer(folder)
    assert not sprung.exists()
    Tokenizer(folder, trust_remote_code=True)
    assert sprung.exists()
