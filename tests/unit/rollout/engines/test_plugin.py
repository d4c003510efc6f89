"""Names of modules that vLLM's processes import."""

from pathlib import Path

from rftmega.rollout.engines.plugin import TRANSPORTS

ROOT = Path(__file__).parents[4]


def test_the_modules_of_registered_transports_exist() -> None:
    for module, kind in TRANSPORTS.values():
        file = ROOT / f"{module.replace('.', '/')}.py"
        assert f"class {kind}(" in file.read_text()
