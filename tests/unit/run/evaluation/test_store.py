from pathlib import Path

import pytest

from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError
from rftmega.core.types import Prompt, Rollout
from rftmega.monitoring.observers.evaluate import Evaluated
from rftmega.run.evaluation.evaluate import begin
from rftmega.run.evaluation.store import Store


def test_completions_are_read_as_they_were_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    store = Store(tmp_path / "a/b.jsonl", lambda ids: "".join(map(str, ids)))
    assert store.read() == {}
    prompt = Prompt((1, 2), label="3", index=4)
    lost = Rollout((), measures={"turns": 2.0}, lost="no server")
    found = store.add([(Evaluated("hard", "", 1, prompt, lost, {}), None)], 7)
    assert store.read() == found
    assert found["hard", 4, 1].lost == "no server"
    with store.path.open("a") as file:
        file.write('{"set": "hard", "ind')
    assert store.read() == found
    assert store.path.read_bytes().endswith(b"}\n")
    more = store.add([(Evaluated("hard", "", 2, prompt, lost, {"reward": 1 / 3}), "7")], 7)
    assert store.read() == found | more
    assert more["hard", 4, 2].scores == {"reward": 1 / 3}


def test_another_evaluation_in_the_folder_is_refused_and_more_samples_are_not(
    tmp_path: Path,
) -> None:
    config = RunConfig()
    begin(tmp_path, config, {"data.eval": {"sha256": "a"}})
    config.trainer.eval_samples, config.trainer.eval_pass_at = 8, [4]
    begin(tmp_path, config, {"data.eval": {"sha256": "a"}})
    with pytest.raises(ConfigError, match=r"data\.eval has changed"):
        begin(tmp_path, config, {"data.eval": {"sha256": "b"}})
    config.trainer.eval_temperature = 0.5
    with pytest.raises(ConfigError, match=r"trainer\.eval_temperature: 0\.0 -> 0\.5"):
        begin(tmp_path, config, {"data.eval": {"sha256": "a"}})
