"""A user's own parts in a run of several processes, which read the user's file each."""

from pathlib import Path

from tests.e2e.conftest import Run, metrics_of
from tests.unit.config.test_plugins import PARTS


def test_ranks_learn_by_parts_of_a_users_own_and_go_on_from_a_checkpoint(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    (tmp_path / "my_parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(
        f"base: {arithmetic / 'run.yaml'}\n"
        "plugins: [my_parts.py]\n"
        "algorithm: {advantage: {type: scaled, factor: 3}, policy_loss: square}\n"
        "reward: {custom: {brevity: {weight: 1}}}\n"
    )
    output = tmp_path / "out"
    given = [
        tmp_path / "run.yaml",
        "--processes",
        2,
        "parallel.tensor=2",
        "checkpoint.every=1",
        f"trainer.output={output}",
    ]
    first = train(*given, "trainer.steps=1", "data.eval=")
    assert first.returncode == 0, first.stdout + first.stderr
    again = train(*given, "trainer.steps=2", "data.eval=", "algorithm.advantage.factor=2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "algorithm.advantage.factor: 3.0 -> 2.0" in again.stdout + again.stderr
    steps = [step for step in metrics_of(output) if "reward_brevity" in step]
    assert len(steps) == 2
