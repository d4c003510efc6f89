"""Who may import whom, and which outside names a unit may say: the map of ARCHITECTURE.md,
executable.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LEARNT = "algorithms rewards data environments conversations toolsets agents experience gap trainer callbacks"
RUNS = (
    "device parallel passes kernels layers checkpoint requests rollout vllm_server server_protocol fleet dispatch weights "
    "planning model_providers converters hf_folders flops known_fields"
)
BACKENDS = "megatron fsdp conversion"  # only what chooses one may name it
BASICS = (
    "config options user_code validation errors json_files media types interfaces shards "
    "sampling_seeds columns rollout_arrays control_tokens"
)
MAY_IMPORT = {
    "user_code": "errors",
    "options": "errors user_code",
    "config": "options errors json_files user_code",
    "errors": "",
    "json_files": "errors",
    "columns": "errors",
    "types": "columns media",
    "media": "errors json_files",
    "shards": "",
    "interfaces": "media types shards columns",
    "sampling_seeds": "",
    "rollout_arrays": "columns media types",
    "environments": "config options errors types interfaces conversations toolsets agents",
    "conversations": "errors json_files types",
    "toolsets": "options errors user_code types",
    "agents": "options errors user_code types interfaces conversations",
    "algorithms": "types config options columns",
    "sandbox": "",
    "rewards": "types errors json_files config options user_code",
    "data": "media config types errors json_files records chats control_tokens",
    "control_tokens": "",
    "chats": "config errors json_files records",
    "given_media": "data media config types errors",
    "records": "config errors json_files user_code",
    "validation": "config options errors json_files user_code",
    "experience": "media errors types interfaces columns rollout_arrays algorithms config",
    "gap": "errors json_files types interfaces sampling_seeds columns algorithms experience",
    "trainer": "media errors config types interfaces sampling_seeds columns rollout_arrays algorithms experience gap",
    "callbacks": "media errors json_files config options types interfaces columns sampling_seeds algorithms experience",
    "device": "errors",
    "kernels": "device",
    "layers": "columns errors kernels",
    "flops": "model_providers hf_folders",
    "known_fields": "",
    "passes": "columns config types media errors device parallel model_providers flops",
    "parallel": "config columns errors device",
    "optimizers": "config device",
    "megatron": "columns config types media shards errors json_files device parallel passes kernels layers checkpoint "
    "optimizers model_providers converters hf_folders",
    "low_rank": "config shards",
    "fsdp": "config types media shards errors json_files device parallel passes kernels low_rank checkpoint model_providers "
    "hf_folders",
    "checkpoint": "config shards errors json_files device parallel converters hf_folders known_fields",
    "conversion": "config options errors json_files parallel checkpoint megatron model_providers converters hf_folders",
    "requests": "columns media types",
    "rollout": "columns media config types shards interfaces errors json_files device parallel kernels weights transport "
    "requests hf_folders",
    "vllm_server": "parallel rollout",
    "server_protocol": "config columns errors json_files requests vllm_server",
    "fleet": "server_protocol vllm_server columns media config types shards interfaces errors device parallel transport requests "
    "rollout sampling_seeds",
    "dispatch": "columns media types interfaces shards sampling_seeds rollout_arrays errors device parallel rollout fleet "
    "requests",
    "weights": "config types shards interfaces errors json_files device parallel converters hf_folders",
    "transport": "types shards errors parallel weights hf_folders",
    "planning": "columns transport config validation shards errors parallel weights model_providers converters hf_folders flops "
    "known_fields",
    "strategy": f"{BASICS} {LEARNT} {RUNS}",
    "observe": f"{BASICS} {LEARNT} {RUNS} strategy",
    "launch": f"{BASICS} {LEARNT} {RUNS} {BACKENDS} strategy observe",
    "lightrft": f"{BASICS} {LEARNT} {RUNS} {BACKENDS} strategy given_media",
    "lightrft_multimodal": f"{BASICS} {LEARNT} {RUNS} lightrft given_media",
    "model_providers": "config errors json_files device layers converters known_fields",
    "converters": "errors json_files shards",
    "hf_folders": "options shards errors json_files converters kernels model_providers",
    "__main__": "config parallel launch",
}
ONLY_IN = {
    "megatron": "columns parallel megatron layers optimizers model_providers",
    "torchao": "optimizers",
    "megatron.core.parallel_state": "parallel",
    "torch.distributed": "parallel kernels megatron fsdp weights transport strategy checkpoint rollout dispatch observe launch"
    " lightrft",
    "torch.cuda": "device",
    "vllm": "rollout fleet vllm_server",
    "transformers": "rollout data media model_providers known_fields hf_folders fsdp conversion",
    "pyarrow": "records",
    "datasets": "records",
    "renderers": "conversations",
}
RELATIVE = "a relative import"
LINKED = ("model_providers", "converters")  # folders beside the package, and parts of it
# units whose import must cost nothing
HEAVY = ("torch", "transformers", "megatron", "vllm", "renderers", "openai")
LIGHT = {"config": HEAVY, "options": HEAVY, "validation": HEAVY}


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import and every dotted attribute, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, RELATIVE
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def unit_of(path: Path, root: Path) -> str:
    first, *rest = path.relative_to(root).parts
    return (rest[0] if first == "rftmega" else first).removesuffix(".py")


def violations(root: Path) -> list[str]:
    found = []
    packages = [root / name for name in ("rftmega", "model_providers", "converters")]
    for path in sorted(p for package in packages for p in package.rglob("*.py")):
        unit = unit_of(path, root)
        if unit == "__init__":
            continue
        for line, name in names_in(path):
            if name == RELATIVE:
                found.append(f"{path.relative_to(root)}:{line}: {name}: write the whole name")
            inside = name.split(".")
            if inside[0] in LINKED:
                found.append(
                    f"{path.relative_to(root)}:{line}: write rftmega.{name}: nothing else is installed"
                )
            target = inside[1] if inside[0] == "rftmega" and len(inside) > 1 else ""
            if target in MAY_IMPORT:
                if target not in (unit, *MAY_IMPORT[unit].split()):
                    found.append(f"{path.relative_to(root)}:{line}: {unit} may not import {target}")
                continue
            for outside, homes in ONLY_IN.items():
                if f"{name}.".startswith(f"{outside}.") and unit not in homes.split():
                    found.append(
                        f"{path.relative_to(root)}:{line}: {outside} belongs in {homes}, not {unit}"
                    )
            if any(f"{name}.".startswith(f"{heavy}.") for heavy in LIGHT.get(unit, ())):
                found.append(
                    f"{path.relative_to(root)}:{line}: {unit} must import nothing heavy, not {name}"
                )
    return found


def test_imports_follow_the_map() -> None:
    assert violations(Path(__file__).parents[1]) == []


@pytest.mark.parametrize(
    ("path", "code", "complaint"),
    [
        (
            "rftmega/trainer/bad.py",
            "from rftmega.backends.megatron import MegatronActor",
            "trainer may not import megatron",
        ),
        (
            "rftmega/trainer/bad.py",
            "from rftmega.monitoring.observers.observer import Observer",
            "trainer may not import callbacks",
        ),
        (
            "rftmega/monitoring/observers/bad.py",
            "from rftmega.trainer import PPOTrainer",
            "callbacks may not import trainer",
        ),
        (
            "rftmega/trainer/experience/bad.py",
            "import torch\ntorch.cuda.synchronize()",
            "torch.cuda belongs in device, not experience",
        ),
        (
            "rftmega/environments/bad.py",
            "from rftmega.rollout.pool.running_rollouts import RunningRollouts",
            "environments may not import dispatch",
        ),
        (
            "rftmega/rollout/pool/bad.py",
            "from rftmega.environments import SingleTurnEnvironment",
            "dispatch may not import environments",
        ),
        (
            "rftmega/rollout/engines/bad.py",
            "from rftmega.rollout.pool.engine_pool import EnginePool",
            "rollout may not import dispatch",
        ),
        (
            "rftmega/run/placement/bad.py",
            "def f():\n    from rftmega.backends.megatron import MegatronActor",
            "strategy may not import megatron",
        ),
        (
            "rftmega/checkpoints/bad.py",
            "from rftmega.backends.megatron import MegatronActor",
            "checkpoint may not import megatron",
        ),
        (
            "rftmega/weights/bad.py",
            "from rftmega.backends.megatron.binding import Bound",
            "weights may not import megatron",
        ),
        (
            "rftmega/weights/bad.py",
            "def f():\n    from vllm import LLM",
            "vllm belongs in rollout fleet vllm_server, not weights",
        ),
        (
            "rftmega/algorithms/bad.py",
            "import torch.distributed as dist",
            "torch.distributed belongs in",
        ),
        (
            "rftmega/rollout/engines/bad.py",
            "from megatron.core import parallel_state",
            "parallel_state belongs in parallel",
        ),
        ("converters/bad.py", "import megatron.core", "megatron belongs in"),
        (
            "converters/bad.py",
            "from rftmega.config import RunConfig",
            "converters may not import config",
        ),
        (
            "rftmega/run/planning/bad.py",
            "import torch.distributed as dist",
            "torch.distributed belongs in",
        ),
        (
            "rftmega/models/kernels/bad.py",
            "from rftmega.backends.megatron import MegatronActor",
            "kernels may not import megatron",
        ),
        ("rftmega/trainer/bad.py", "from ..data import load_prompts", "a relative import"),
        ("rftmega/trainer/bad.py", "from .. import megatron", "a relative import"),
        (
            "rftmega/weights/bad.py",
            "from converters import table",
            "write rftmega.converters.table",
        ),
        ("rftmega/config/bad.py", "import torch", "config must import nothing heavy"),
        (
            "rftmega/config/validation/bad.py",
            "import torch",
            "validation must import nothing heavy",
        ),
        (
            "rftmega/config/bad.py",
            "from rftmega.config.validation import violations",
            "config may not import validation",
        ),
        (
            "rftmega/config/validation/bad.py",
            "from rftmega.data import load_prompts",
            "validation may not import data",
        ),
        (
            "rftmega/run/placement/bad.py",
            "from rftmega.lightrft.strategy import StrategyBase",
            "strategy may not import lightrft",
        ),
        (
            "rftmega/run/bad.py",
            "from rftmega.lightrft.strategy import StrategyBase",
            "launch may not import lightrft",
        ),
        (
            "rftmega/run/placement/bad.py",
            "from rftmega.monitoring.performance.throughput import Throughput",
            "strategy may not import observe",
        ),
        (
            "rftmega/monitoring/bad.py",
            "from rftmega.run.process import joined",
            "observe may not import launch",
        ),
        (
            "rftmega/checkpoints/bad.py",
            "from rftmega.run.placement.phases import DevicePhases",
            "checkpoint may not import strategy",
        ),
    ],
)
def test_a_planted_violation_is_found(path: str, code: str, complaint: str, tmp_path: Path) -> None:
    bad = tmp_path / path
    bad.parent.mkdir(parents=True)
    bad.write_text(code)
    found = violations(tmp_path)
    assert any(complaint in violation for violation in found), found
