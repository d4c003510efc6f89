"""Servers that can't be reached, or get no weights, are refused before they are looked for."""

from pathlib import Path

import pytest

from rftmega.config import load
from rftmega.config.validation.server_group import server_group

NETWORK = ["strategy=separate", "rollout.transport=network"]
SGLANG = ["strategy=separate", "rollout.engine=sglang"]
NEAR, FAR = "rollout.addresses=[http://127.0.0.1:8100]", "rollout.addresses=[http://10.0.0.2:8100]"


def reasons(config_file: Path, *options: str) -> list[str]:
    return server_group(load(config_file, list(options)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([NEAR], "needs strategy=separate: colocated engines are no servers"),
        (["rollout.transport=disk"], "rollout.transport=disk needs strategy=separate"),
        (["strategy=separate", NEAR], "rollout.transport=shared_memory does not reach"),
        (["strategy=separate", "rollout.transport=checkpoint"], "is for servers that others start"),
        ([*NETWORK, NEAR, "rollout.servers=2"], "rollout.servers=2 are started here only without"),
        ([*NETWORK, f"rollout.tls_ca={__file__}"], "is of servers elsewhere: set rollout.addresses"),
        ([*NETWORK, NEAR, "rollout.tls_ca=ca.pem"], "rollout.tls_ca=ca.pem is no file"),
        ([*NETWORK, FAR], "rollout.listen=127.0.0.1 is this host's alone"),
        ([*NETWORK, NEAR, "rollout.listen="], "is empty, which is every address of this host"),
        (["rollout.weights_folder=w"], "is read with rollout.transport=disk or checkpoint alone"),
        (["strategy=separate", "rollout.listen=10.0.0.1"], "is read with rollout.transport=network"),
        ([*NETWORK, "rollout.addresses=[10.0.0.2:8100]"], "'10.0.0.2:8100', which is no address"),
        ([*NETWORK, "rollout.addresses=[http://10.0.0.2]"], "'http://10.0.0.2', which is no"),
        ([*NETWORK, "rollout.addresses=[ftp://a:8100]"], "'ftp://a:8100', which is no address"),
        ([*NETWORK, "rollout.addresses=[http://a:b]"], "'http://a:b', which is no address"),
        ([*NETWORK, "rollout.addresses=[http://a:8100/v1]"], "'http://a:8100/v1', which is no"),
        (SGLANG, "nothing here starts SGLang"),
        ([*SGLANG, FAR, "rollout.transport=disk"], "needs this package in the server, which SGLang"),
        ([*SGLANG, *NETWORK, NEAR, "trainer.eval_top_p=0.9", "trainer.eval_top_k=5"], "SGLang takes top_p of all tokens"),
        ([*SGLANG, *NETWORK, NEAR, "trainer.eval_top_p=0.9", "trainer.eval_min_p=0.1"], "SGLang takes top_p of all tokens"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(options: list[str], said: str, config_file: Path) -> None:
    found = reasons(config_file, *options)
    assert any(said in reason for reason in found), found


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["strategy=separate", "rollout.servers=2"],
        [*NETWORK, NEAR],
        ["strategy=separate", "rollout.transport=checkpoint", FAR, "rollout.weights_folder=w"],
        [*NETWORK, FAR, "rollout.listen=10.0.0.1"],
        ["strategy=separate", "rollout.transport=disk", FAR, "rollout.weights_folder=w"],
        [*NETWORK, "rollout.addresses=[https://a:8100/]", "rollout.listen=b", f"rollout.tls_ca={__file__}"],
        [*NETWORK, 'rollout.addresses=["http://[::1]:8100"]'],
        [*SGLANG, "rollout.transport=network", NEAR, "trainer.eval_top_k=5", "trainer.eval_min_p=0.1"],
        [*SGLANG, "rollout.transport=checkpoint", FAR, "rollout.weights_folder=w", "trainer.eval_top_p=0.9"],
    ],
)  # fmt: skip
def test_what_can_be_is_not(options: list[str], config_file: Path) -> None:
    assert reasons(config_file, *options) == []
