import json
from pathlib import Path

from rftmega.monitoring.performance.timeline import Told, write
from rftmega.runtime.device.spans import Span
from rftmega.runtime.parallel.clocks import Offset


def test_events_of_all_processes_are_on_the_first_ones_clock(tmp_path: Path) -> None:
    """The second process's clock is 7 ms ahead: what it began at 1010 ms of its own was at 1003 of
    the first's.
    """
    everybody = [
        Told("rank 0", [Span("forward", "MainThread", 1_000_000_000, 1_002_000_000)], Offset(0, 0)),
        Told(
            "rank 1",
            [
                Span("reward", "judge", 1_011_000_000, 1_012_500_000),
                Span("update 3", "phases", 1_010_000_000, 1_020_000_000),
                Span("forward", "MainThread", 1_010_000_000, 1_011_000_000),
            ],
            Offset(7_000_000, 20_000),
        ),
    ]
    write(tmp_path / "timeline" / "a.json", everybody)
    (file,) = (tmp_path / "timeline").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    spans = {(e["pid"], e["name"]): (e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"}
    assert spans == {
        (0, "forward"): (0.0, 2000.0, 0),
        (1, "update 3"): (3000.0, 10_000.0, 0),
        (1, "forward"): (3000.0, 1000.0, 1),
        (1, "reward"): (4000.0, 1500.0, 2),
    }
    names = {(e["pid"], e["name"], e.get("tid")): e["args"] for e in events if e["ph"] == "M"}
    assert names[1, "process_name", None] == {"name": "rank 1", "clock_error_us": 20.0}
    assert [names[1, "thread_name", thread]["name"] for thread in range(3)] == [
        "phases",
        "MainThread",
        "judge",
    ]
