"""Ranks of tests are forked from a process that has imported what they need."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

import pytest

from tests import warm_command
from tests.ranks import CONTEXT, LOCAL, start_in


def tell(sender: Connection) -> None:
    sender.send("rftmega.backends.megatron" in sys.modules)


@pytest.mark.ranks
def test_ranks_find_their_imports_whatever_another_module_asks_of_multiprocessing() -> None:
    multiprocessing.set_forkserver_preload(["json"])  # decides for multiprocessing's own server
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=tell, args=(sender,))
    start_in([process], LOCAL)
    assert receiver.recv()
    process.join()


def test_a_command_is_forked_although_imports_of_tests_have_changed_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_command, "STARTED", {})
    monkeypatch.setenv("ADDED_BY_AN_IMPORT", "1")
    assert not warm_command.is_alike(dict(os.environ)), "each command imports everything anew"
    warm_command.tests_begin()
    assert warm_command.is_alike(dict(os.environ))
