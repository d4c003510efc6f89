"""How far it is from `main` to the optimizer."""

import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.ranks import run_ranks

MOST = 11


def calls_body(world: object, config: Path, output: Path) -> list[str]:
    """The functions of ours on the stack when the optimizer acts, of a run that is started as
    torchrun starts one.
    """
    import train_rl
    from rftmega.backends.megatron.manager import MegatronModelManager
    from rftmega.runtime.parallel import process_group

    found: list[str] = []
    real = MegatronModelManager.take_step

    def take_step(self: MegatronModelManager) -> tuple[bool, float]:
        real_step = self.optimizer.step_with_ready_grads

        def step() -> object:
            found[:] = [
                f"{Path(each.filename).name}:{each.name}" for each in traceback.extract_stack()
            ]
            return real_step()

        self.optimizer.step_with_ready_grads = step
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronModelManager, "take_step", take_step)
        patch.setattr(process_group, "start", lambda **_: nullcontext(world))
        patch.setattr(sys, "argv", ["train_rl.py", str(config), "rollout.engine=scripted", "trainer.steps=1",
                                    f"trainer.output={output}", "trainer.export=false", "trainer.eval_every=0"])  # fmt: skip
        assert train_rl.main() == 0
    return found


def test_eleven_calls_lead_from_main_to_the_optimizer(arithmetic: Path, tmp_path: Path) -> None:
    (frames,) = run_ranks(1, calls_body, arithmetic / "run.yaml", tmp_path / "out", timeout=120)
    first = frames.index("train_rl.py:main")
    ours = [frame for frame in frames[first:] if not frame.startswith("test_corridor")]
    assert len(ours) <= MOST, " -> ".join(ours)
