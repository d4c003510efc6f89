"""Checks which subpackage imports which, that nothing imports in a circle, and where outside packages
may be named: the map of ARCHITECTURE.md, executable.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

LEARNED = "core config algorithms data rewards environments trainer monitoring"
RUNTIME = "converters runtime models model_providers weights checkpoints rollout"
MAY_IMPORT = {  # imports point up in this table
    "core": "",
    "sandbox": "",
    "config": "core",
    "converters": "core",
    "algorithms": "core config",
    "data": "core config",
    "rewards": "core config",
    "runtime": "core config",
    "environments": "core config data",
    "models": "core config converters runtime",
    "trainer": "core config algorithms",
    "model_providers": "core config converters runtime models",
    "weights": "core converters runtime models",
    "checkpoints": "core config runtime models",
    "monitoring": "core config algorithms data runtime models trainer",
    "rollout": "core config data runtime models weights",
    "backends": "core config converters data runtime models model_providers checkpoints",
    "run": f"{LEARNED} {RUNTIME} backends",
    "lightrft": f"{LEARNED} {RUNTIME} run",
    "rlinf": f"{LEARNED} {RUNTIME} backends run",
    "__main__": "config runtime run",
}
MAY_NOT = {  # finer than a subpackage: folder -> folders it must not name
    "config/options": "config/validation",
    "runtime/device": "config runtime/parallel",
    "rollout/engines": "rollout/servers rollout/pool",
    "rollout/servers": "rollout/pool",
    "data/records": "data/chat data/media",
    "backends/megatron": "backends/fsdp",
    "backends/fsdp": "backends/megatron model_providers/families",
    "backends/runner": "backends/megatron backends/fsdp",
    "run/placement": "backends",
    "run/planning": "backends/megatron backends/fsdp rollout",
    "weights/transports": "weights/receivers",
}
ONLY_IN = {  # outside package -> the folders that may name it
    "megatron": "runtime/parallel models/layers model_providers backends/megatron backends/optimizers",
    "megatron.core.parallel_state": "runtime/parallel",
    "torch.cuda": "runtime/device",
    "torch.distributed": "runtime/parallel models/kernels backends/megatron backends/fsdp weights checkpoints rollout/pool "
    "run monitoring/performance lightrft rlinf",
    "torchao": "backends/optimizers",
    "vllm": "rollout/engines rollout/servers weights/receivers",
    "transformers": "data models backends/decoder backends/fsdp model_providers rollout/engines run/conversion run/model_check",
    "pyarrow": "data/records",
    "datasets": "data/records",
    "renderers": "data/chat",
}
HEAVY = ("torch", "transformers", "megatron", "vllm", "renderers", "openai")
LIGHT = ("config", "sandbox", "core/errors", "core/json_files")  # their import must cost nothing
LINKED = ("model_providers", "converters")  # folders beside the package, and parts of it
RELATIVE = "a relative import"


@cache
def nodes(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def names_in(path: Path, *, attributes: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, and of every dotted attribute, at any depth."""
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, RELATIVE
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif attributes and isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def modules(root: Path) -> dict[str, Path]:
    """The file of each module, by its path in the package without a suffix: "trainer/ppo"."""
    found = {}
    for package in ("rftmega", *LINKED):
        for path in sorted((root / package).rglob("*.py")):
            inside = path.relative_to(root / "rftmega" if package == "rftmega" else root)
            found[inside.as_posix().removesuffix(".py").removesuffix("/__init__")] = path
    found.pop("__init__", None)  # the package itself
    return found


def within(module: str, folders: str) -> bool:
    return any(f"{module}/".startswith(f"{folder}/") for folder in folders.split())


def violations(root: Path) -> list[str]:
    found = []
    for module, path in modules(root).items():
        unit = module.partition("/")[0]
        for line, name in names_in(path):
            where = f"{path.relative_to(root)}:{line}"
            if name == RELATIVE:
                found.append(f"{where}: {name}: write the whole name")
            first, *rest = name.split(".")
            if first in LINKED:
                found.append(f"{where}: write rftmega.{name}: nothing else is installed")
            target = "/".join(rest) if first == "rftmega" else ""
            to = target.partition("/")[0]
            if to in MAY_IMPORT:
                if to not in (unit, *MAY_IMPORT.get(unit, "").split()):
                    found.append(f"{where}: {unit} may not import {to}")
                for folder, others in MAY_NOT.items():
                    if within(module, folder) and within(target, others):
                        found.append(f"{where}: {folder} may not import {others}")
                continue
            for outside, homes in ONLY_IN.items():
                if f"{name}.".startswith(f"{outside}.") and not within(module, homes):
                    found.append(f"{where}: {outside} belongs in {homes}, not {module}")
            if within(module, " ".join(LIGHT)) and first in HEAVY:
                found.append(f"{where}: {module} must import nothing heavy, not {name}")
    return found


def imported(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports; what only a type checker imports included."""
    files = modules(root)
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        found[module] = set()
        for _, name in names_in(path, attributes=False):
            first, *rest = name.split(".")
            while first == "rftmega" and rest and "/".join(rest) not in files:
                rest.pop()
            if first == "rftmega" and rest:
                found[module].add("/".join(rest))
    return found


def children(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same between a subpackage's files and folders; of the families' folders, between files."""

    def child(module: str) -> str:
        return module if "/families/" in module else "/".join(module.split("/")[:2])

    found: dict[str, set[str]] = {}
    for module, targets in edges.items():
        found.setdefault(child(module), set()).update(map(child, targets))
    return found


def circles(edges: Mapping[str, set[str]]) -> set[str]:
    """Everything that leads back to itself."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    plain = {name: targets - {name} for name, targets in edges.items()}
    edges = plain
    return {name for name in plain if name in reached(name)}


def names_compared(root: Path) -> list[str]:
    """Comparisons of an attribute or variable `backend` or `engine` with a name in quotes."""
    found = []
    for module, path in modules(root).items():
        for node in nodes(path.read_text()):
            if not isinstance(node, ast.Compare):
                continue
            left = node.left
            named = getattr(left, "attr", getattr(left, "id", ""))
            quoted = any(
                isinstance(each, ast.Constant) and isinstance(each.value, str)
                for side in node.comparators
                for each in ast.walk(side)
            )
            if named in ("backend", "engine") and quoted:
                found.append(
                    f"{module}:{node.lineno}: ask config.capabilities: {ast.unparse(node)}"
                )
    return found


def test_capabilities_are_asked_instead_of_names_of_backends_and_engines(tmp_path: Path) -> None:
    assert names_compared(Path(__file__).parents[1]) == []
    bad = tmp_path / "rftmega/run/bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text('a = config.backend == "fsdp"\nb = rollout.engine not in ("vllm", "sglang")')
    assert [each.partition(": ")[0] for each in names_compared(tmp_path)] == [
        *("run/bad:1", "run/bad:2")
    ]


def test_imports_follow_the_map() -> None:
    assert violations(Path(__file__).parents[1]) == []


def test_nothing_imports_in_a_circle() -> None:
    edges = imported(Path(__file__).parents[1])
    assert circles(edges) == set()
    assert circles(children(edges)) == set()
    order = list(MAY_IMPORT)
    assert all(
        order.index(to) < order.index(unit)
        for unit, allowed in MAY_IMPORT.items()
        for to in allowed.split()
    )


def test_a_circle_between_files_or_folders_is_found(tmp_path: Path) -> None:
    for path, code in {
        "trainer/__init__.py": "",
        "trainer/a.py": "from rftmega.trainer.inner.b import f",
        "trainer/inner/__init__.py": "",
        "trainer/inner/b.py": "def f():\n    from rftmega.trainer import c",
        "trainer/inner/d.py": "",
        "trainer/c.py": "import rftmega.trainer.inner.d",
    }.items():
        file = tmp_path / "rftmega" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    assert circles(imported(tmp_path)) == set()
    assert circles(children(imported(tmp_path))) == {"trainer/inner", "trainer/c"}
    (tmp_path / "rftmega/trainer/inner/d.py").write_text("from rftmega.trainer import a")
    assert circles(imported(tmp_path)) == {
        *("trainer/a", "trainer/c", "trainer/inner/b", "trainer/inner/d")
    }


@pytest.mark.parametrize(
    ("path", "code", "complaint"),
    [
        ("trainer", "from rftmega.backends.megatron import A", "trainer may not import backends"),
        ("trainer", "from rftmega.monitoring.observers import a", "trainer may not import monit"),
        ("monitoring", "from rftmega.run.process import joined", "monitoring may not import run"),
        ("trainer", "import torch\ntorch.cuda.synchronize()", "torch.cuda belongs in runtime"),
        ("environments", "from rftmega.rollout.pool import a", "environments may not import roll"),
        ("rollout/pool", "from rftmega.environments import a", "rollout may not import environ"),
        ("rollout/engines", "from rftmega.rollout.pool import a", "may not import rollout/servers"),
        ("run/placement", "def f():\n    import rftmega.backends.fsdp", "may not import backends"),
        ("run/planning", "import rftmega.backends.megatron.actor", "run/planning may not import"),
        ("checkpoints", "from rftmega.backends.megatron import A", "checkpoints may not import"),
        ("weights", "from rftmega.backends.megatron import A", "weights may not import backends"),
        ("weights", "def f():\n    from vllm import LLM", "vllm belongs in rollout/engines"),
        ("algorithms", "import torch.distributed as dist", "torch.distributed belongs in"),
        ("rollout", "from megatron.core import parallel_state", "parallel_state belongs in"),
        ("models/lora", "import megatron.core", "megatron belongs in"),
        ("../converters", "import megatron.core", "megatron belongs in"),
        ("../converters", "from rftmega.config import RunConfig", "converters may not import conf"),
        ("run/planning", "import transformers", "transformers belongs in"),
        ("models/kernels", "from rftmega.backends.megatron import A", "models may not import back"),
        ("trainer", "from ..data import load_prompts", "a relative import"),
        ("trainer", "from .. import backends", "a relative import"),
        ("weights", "from converters import table", "write rftmega.converters.table"),
        ("config", "import torch", "must import nothing heavy"),
        ("config/validation", "import torch", "must import nothing heavy"),
        ("config/options", "from rftmega.config.validation import a", "options may not import"),
        ("config", "from rftmega.data import load_prompts", "config may not import data"),
        ("run", "from rftmega.lightrft.strategy import A", "run may not import lightrft"),
        ("core", "from rftmega.config import RunConfig", "core may not import config"),
        ("sandbox", "from rftmega.core.errors import A", "sandbox may not import core"),
    ],
)
def test_a_planted_violation_is_found(path: str, code: str, complaint: str, tmp_path: Path) -> None:
    bad = (tmp_path / "rftmega" / path / "bad.py").resolve()
    bad.parent.mkdir(parents=True)
    bad.write_text(code)
    found = violations(tmp_path)
    assert any(complaint in violation for violation in found), found
