"""The front door: what it refuses, what reaches the ranks, and what it costs to import."""

import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

import rftmega
from rftmega.config import load
from rftmega.config.user_code.functions import function_of
from rftmega.core.errors import ConfigError
from rftmega.run import api


def test_importing_rftmega_and_its_train_costs_nothing() -> None:
    heavy = "('torch', 'transformers', 'megatron', 'vllm', 'cloudpickle')"
    program = (
        f"import sys, rftmega; rftmega.train; sys.exit(any(m in sys.modules for m in {heavy}))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_all_that_is_wrong_is_one_error(config_file: Path) -> None:
    def mine(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(ConfigError) as raised:
        rftmega.train(
            config_file,
            processes=2,
            overrides=["parallel.tensor=4", "reward.function_weights=[1]"],
            rewards=[mine, f"{config_file.parent}/nowhere.py:f"],
        )
    for told in ("parallel.tensor = 4 does not divide", "there is no file", "must be one for each"):
        assert told in str(raised.value)
    with pytest.raises(ConfigError, match="environment"):
        rftmega.train(config_file, environment=object())
    with pytest.raises(ConfigError, match="of a RunConfig, change the fields"):
        rftmega.train(load(config_file), overrides=["trainer.steps=1"])


def test_the_users_files_are_as_open_as_before(config_file: Path) -> None:
    os.umask(0o022)
    with pytest.raises(ConfigError):
        rftmega.train(config_file, overrides=["trainer.steps=0"])
    assert os.umask(0o022) == 0o022


def test_closures_and_lambdas_reach_another_process() -> None:
    wanted = {"4"}

    def ends_well(completions: Any) -> list[float]:
        return [float(text[-1] in wanted) for text in completions]

    sent = api.sent([ends_well, lambda completions: [1.0]])
    api.functions_given(api.sent([len]))
    api.functions_given(sent)
    assert function_of("python:ends_well")(completions=["14", "41"]) == [1.0, 0.0]
    assert function_of("python:lambda")(completions=[""]) == [1.0]
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="can't be sent to the ranks: cannot pickle"):
        api.sent([lambda completions: lock and [1.0]])


def test_functions_replace_what_compares_with_labels(config_file: Path) -> None:
    def named(*overrides: str) -> tuple[float, str, str]:
        config = load(config_file, ["reward.functions=[a.py:f]", *overrides])
        return config.reward.exact_match, config.data.label_key, config.trainer.eval_accuracy

    assert named() == (0.0, "", "exact_match")
    assert named("data.eval=x") == (0.0, "", "f")
    assert named("data.label_key=answer", "data.eval=x") == (0.0, "answer", "f")
    assert named("reward.exact_match=1", "data.eval=x") == (1.0, "label", "exact_match")
    assert named("reward.math=1", "data.eval=x") == (0.0, "label", "exact_match")


def test_a_functions_file_is_found_from_the_working_directory(config_file: Path) -> None:
    config_file.write_text(
        config_file.read_text() + "reward: {functions: [mine.py:f, package.rewards:g]}\n"
    )
    found = load(config_file).reward.functions
    assert found == ["mine.py:f", "package.rewards:g"]


def test_a_dictionary_is_a_config(config_file: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        rftmega.train(
            {"model": {"path": "x"}, "trainer": {"stepz": 3}}, overrides=["trainer.seed=a"]
        )
    for told in ("trainer.stepz is not an option", "trainer.seed='a' must be a whole number"):
        assert told in str(raised.value)


def test_warnings_of_other_packages_are_hidden_and_a_users_own_are_not() -> None:
    def warn(module: str) -> None:
        warnings.warn_explicit("not installed", UserWarning, "a.py", 1, module=module)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with api.quiet_imports():
            for module in ("megatron.core.optimizer", "vllm.triton_utils", "vllmore", "my_rewards"):
                warn(module)
        warn("megatron.core")
    assert len(seen) == 3, "of vllmore, of my_rewards, and after the block"


def test_an_error_holds_no_variables_of_the_package_and_all_of_the_users() -> None:
    """A notebook keeps the last error, and with it would keep the models of the run."""
    package = {"__name__": "rftmega.somewhere"}
    exec("def build(thing, then):\n    held = thing\n    then()", package)

    class Model:
        pass

    model, of_users = Model(), []
    seen = weakref.ref(model)

    def reward() -> None:
        completion = [1]
        of_users.append(completion)
        raise ValueError(completion)

    with pytest.raises(ValueError) as raised, api.memory_given_back():
        package["build"](model, reward)
    del model
    assert seen() is None
    frames = [frame.frame for frame in raised.traceback]
    (own,) = [frame.f_locals for frame in frames if "completion" in frame.f_locals]
    assert own["completion"] is of_users[0]


@pytest.mark.ranks
def test_megatron_may_be_imported_before_a_run_where_rftmega_was_imported_first() -> None:
    program = (
        "import sys, rftmega\nassert 'torch' not in sys.modules\nimport megatron.core\n"
        "import rftmega.runtime.parallel.topology\n"
        "from megatron.core.tensor_parallel import layers\nimport torch\n"
        "sys.exit(layers.torch is torch and not torch.cuda.is_available())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
