"""A library of tasks in a few lines, with reasoning_gym's names."""

from pathlib import Path

SOURCE = """
import os
from dataclasses import dataclass
@dataclass
class Config:
    low: int = 1
    names: tuple[str, ...] = ("a",)
    seed: int | None = None
    size: int = 4
    def validate(self):
        assert self.low > 0, "low must be positive"
class Sums:
    def __init__(self, config):
        config.validate()
        self.config = config
    def __len__(self):
        return self.config.size
    def __getitem__(self, index):
        number = (self.config.seed + index) % 10
        low, letters = self.config.low, list(set("abcdef"))
        return {"question": f"{number}+{low}", "answer": f"{number + low}", "metadata": {"letters": letters}}
    def score_answer(self, answer, entry):
        return float(answer is not None and eval(answer) == int(entry["answer"]))
DATASETS = {"sums": (Sums, Config), "products": (Sums, Config)}
def has_curriculum(name):
    return False
def create_dataset(name, **values):
    return DATASETS[name][0](Config(**values))
"""


def write(folder: Path) -> Path:
    """Writes the package reasoning_gym into `folder`, which is returned."""
    package = folder / "reasoning_gym"
    package.mkdir()
    (package / "factory.py").write_text(SOURCE)
    (package / "__init__.py").write_text("from reasoning_gym.factory import create_dataset\n")
    return folder
