"""Checks of engine servers and of the weight transport to them."""

from pathlib import Path
from urllib.parse import urlsplit

from rftmega.config.addresses import address_of
from rftmega.config.capabilities import engine_of
from rftmega.config.schema import RolloutConfig, RunConfig
from rftmega.config.secrets import shown

ELSEWHERE = ("addresses", "server_list", "tls_ca")
SGLANG_TRANSPORTS = ("network", "checkpoint")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def server_group(config: RunConfig) -> list[str]:
    """Returns the problems of engine servers and their weight transport."""
    rollout, found = config.rollout, []
    separate = config.strategy == "separate"
    for option in (*ELSEWHERE, "transport"):
        value = getattr(rollout, option)
        if value and value != getattr(RolloutConfig, option, []) and not separate:
            found.append(
                f"{shown(f'rollout.{option}', value)} needs strategy=separate: colocated engines are no servers."
            )
    if found or not separate:
        return found + _unread(config)
    found = [reason for address in rollout.addresses for reason in _malformed(address)]
    elsewhere = bool(rollout.addresses or rollout.server_list)
    if elsewhere and rollout.transport == "shared_memory":
        found.append(
            "rollout.addresses and rollout.server_list are of servers elsewhere, which rollout.transport=shared_memory does not "
            "reach. Set it to network, disk or checkpoint."
        )
    if rollout.transport == "checkpoint" and not elsewhere:
        found.append(
            "rollout.transport=checkpoint is for servers that others start: set rollout.addresses or rollout.server_list, "
            "or take another transport."
        )
    found += _sglang(config)
    if elsewhere and rollout.servers != RolloutConfig.servers:
        found.append(
            f"rollout.servers={rollout.servers} are started here only without rollout.addresses and "
            "rollout.server_list. Leave it out."
        )
    if rollout.tls_ca and not elsewhere:
        found.append(
            f"rollout.tls_ca={rollout.tls_ca} is of servers elsewhere: set rollout.addresses or rollout.server_list, "
            "or leave it out."
        )
    if rollout.tls_ca and not Path(rollout.tls_ca).is_file():
        found.append(f"rollout.tls_ca={rollout.tls_ca} is no file.")
    right = [each for each in rollout.addresses if not _malformed(each)]
    far = [each for each in right if urlsplit(each).hostname not in LOOPBACK]
    if not rollout.listen.strip():
        found.append(
            f"rollout.listen={rollout.listen} is empty, which is every address of this host. Set it to the one at which servers "
            "reach it."
        )
    elif far and rollout.transport == "network" and rollout.listen in LOOPBACK:
        found.append(
            f"rollout.listen={rollout.listen} is this host's alone, and {far[0]} is elsewhere. Set it to the address at which "
            "that host reaches this one."
        )
    return found + _unread(config)


def _sglang(config: RunConfig) -> list[str]:
    """Returns the problems of options that SGLang servers do not support."""
    rollout, found = config.rollout, []
    if engine_of(rollout).started_here:
        return []
    if not (rollout.addresses or rollout.server_list):
        found.append(
            "rollout.engine=sglang: nothing here starts SGLang. Start `python -m sglang.launch_server` and set rollout.addresses "
            "or rollout.server_list."
        )
    if rollout.transport not in SGLANG_TRANSPORTS:
        found.append(
            f"rollout.transport={rollout.transport} needs this package in the server, which SGLang has not. Set it to "
            f"{' or '.join(SGLANG_TRANSPORTS)}."
        )
    trainer = config.trainer
    if trainer.eval_top_p < 1 and (trainer.eval_top_k or trainer.eval_min_p):
        found.append(
            f"trainer.eval_top_p={trainer.eval_top_p} with eval_top_k={trainer.eval_top_k} and eval_min_p={trainer.eval_min_p}: "
            "SGLang takes top_p of all tokens, vLLM of those that the others keep. Set one of them alone with "
            "rollout.engine=sglang."
        )
    return found


def _unread(config: RunConfig) -> list[str]:
    """Returns a problem for each option that is set although only another rollout.transport reads
    it.
    """
    found = []
    read_by = {"listen": ("network",), "weights_folder": ("disk", "checkpoint")}
    for option, transports in read_by.items():
        value = getattr(config.rollout, option)
        if value != getattr(RolloutConfig, option) and config.rollout.transport not in transports:
            found.append(
                f"rollout.{option}={value} is read with rollout.transport={' or '.join(transports)} alone. Leave it out."
            )
    return found


def _malformed(address: str) -> list[str]:
    if "@" in address:
        host = address.rpartition("@")[2]
        return [
            f"rollout.addresses has a user or a password before @{host}. Leave them out: a server takes the "
            "key that RFTMEGA_SERVER_KEY holds, here and there."
        ]
    try:
        address_of(address)
    except ValueError as error:
        return [
            f"rollout.addresses has {address!r}, which is no address as http://10.0.0.2:8100: {error}."
        ]
    return []
