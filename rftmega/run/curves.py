"""Plots metrics over the steps of a run; needs matplotlib."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

from rftmega.monitoring.history import Step

COLUMNS = 3
SIZE = 4.0, 2.5  # of a curve, in inches


class Curves(Figure):
    """Curves is a figure with one curve per metric; a notebook shows it as an image."""

    def __init__(self, history: Sequence[Step], names: Sequence[str]):
        """`history`: the metrics of each step; `names`: the metrics to plot. Raises KeyError for a
        metric that no step has.
        """
        rows = max(1, -(-len(names) // COLUMNS))
        width, height = SIZE
        super().__init__(figsize=(width * COLUMNS, height * rows), layout="constrained")
        known = {name for step in history for name in step}
        for place, name in enumerate(names, start=1):
            if name not in known:
                raise KeyError(f"No step has the metric {name}. Those there are: {sorted(known)}")
            own: list[Any] = [step for step in history if step.get(name) is not None]
            axes = self.add_subplot(rows, COLUMNS, place)
            axes.plot([step["step"] for step in own], [step[name] for step in own], marker=".")
            axes.set_title(name)
            axes.set_xlabel("step")

    def _repr_png_(self) -> bytes:
        """Returns the figure as PNG, for a notebook."""
        image = BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()
