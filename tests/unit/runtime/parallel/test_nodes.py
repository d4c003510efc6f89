from pathlib import Path

import pytest

from rftmega.runtime.parallel import nodes
from rftmega.runtime.parallel.nodes import NodeReport, complaints

GB = 10**9


def reports(**of_the_third: object) -> list[NodeReport]:
    """Four ranks on two hosts; the third is the first of its host."""
    fine = {"versions": {"torch": "2.9", "vllm": "0.32"}, "free": {"out": 5 * GB}}
    return [
        NodeReport(rank, f"host{rank // 2}", **(fine | (of_the_third if rank == 2 else {})))
        for rank in range(4)
    ]  # type: ignore[arg-type]


def test_equal_hosts_with_enough_disk_are_let_through() -> None:
    assert complaints(reports(), {"out": 5 * GB}, [100.0, 104.0, 99.0, 101.0]) == []


@pytest.mark.parametrize(
    ("third", "clock", "said"),
    [
        (
            {"versions": {"torch": "2.8", "vllm": "0.32"}},
            0,
            "rank 2 on host1 has torch 2.8, others 2.9",
        ),
        (
            {"free": {"out": 2 * GB}},
            0,
            "rank 2 on host1 finds 2.0 GB free for out; this run writes 5.0 GB there",
        ),
        (
            {"free": {"out": "/data is not this user's to write"}},
            0,
            "rank 2 on host1 can't write to out: /data is not",
        ),
        ({}, 60, "rank 2 on host1 has a clock 60 s ahead of the others'"),
        ({}, -60, "rank 2 on host1 has a clock 60 s behind the others'"),
    ],
)
def test_the_one_that_differs_is_named(third: dict[str, object], clock: float, said: str) -> None:
    found = complaints(reports(**third), {"out": 5 * GB}, [0.0, 0.0, clock, 0.0])
    assert len(found) == 1
    assert found[0].startswith(said)


def test_a_host_is_named_once_for_all_its_ranks() -> None:
    found = complaints(reports(), {"out": 6 * GB}, [0.0] * 4)
    assert [text.split(" finds")[0] for text in found] == ["rank 0 on host0", "rank 2 on host1"]


def test_a_folder_to_come_is_on_its_parents_disk(tmp_path: Path) -> None:
    assert nodes._free(tmp_path / "a/b") == nodes._free(tmp_path)
    assert nodes._free(Path("/proc/1/nowhere")) != 0


def test_a_changed_source_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rftmega/runtime/parallel"
    package.mkdir(parents=True)
    (package / "nodes.py").write_text("a = 1\n")
    monkeypatch.setattr(nodes, "__file__", str(package / "nodes.py"))
    before = nodes.versions()
    assert (
        before["torch"].startswith("2.")
        and before["vllm"] != "(none)"
        and before["megatron"] != "(none)"
    )
    (package / "nodes.py").write_text("a = 2\n")
    after = nodes.versions()
    assert {name for name in before if before[name] != after[name]} == {"rftmega"}
