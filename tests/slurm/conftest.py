"""One cluster for all tests here."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import arithmetic
from tests.slurm.cluster import Cluster, running, why_not

__all__ = ["arithmetic", "cluster"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with running(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started
