"""Names of modules that vLLM's processes import."""

from pathlib import Path

import pytest

from rftmega.rollout.engines import plugin
from rftmega.rollout.engines.plugin import TRANSPORTS

ROOT = Path(__file__).parents[4]


def test_the_modules_of_registered_transports_exist() -> None:
    for module, kind in TRANSPORTS.values():
        file = ROOT / f"{module.replace('.', '/')}.py"
        assert f"class {kind}(" in file.read_text()


def test_a_process_of_vllm_is_told_to_end_with_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(plugin, "server_ends_with_parent", lambda: told.append(True))
    plugin.register()
    assert told == [True]
