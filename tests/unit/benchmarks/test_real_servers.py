"""What the benchmark of real servers makes of the times at which answers are asked for."""

from pathlib import Path

import pytest

from benchmarks.real_servers import idle_share


def test_the_idle_share_is_of_the_counted_time_alone(tmp_path: Path) -> None:
    """Asked from 1 to 3 and from 8 to 20 seconds; 2 to 12 are counted."""
    asked = tmp_path / "asked"
    asked.write_text("1.0 1\n1.5 2\n2.5 1\n3.0 0\n8.0 1\n20.0 0\n")
    assert idle_share(asked, 2.0, 12.0) == pytest.approx(0.5)
    assert idle_share(asked, 3.0, 8.0) == pytest.approx(1.0)
    assert idle_share(asked, 9.0, 12.0) == pytest.approx(0.0)
