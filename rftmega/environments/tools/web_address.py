"""Validation of server URLs, and HTTP headers with the keys for these servers."""

import os
from urllib.parse import urlsplit

from rftmega.core.errors import ConfigError


def checked_address(url: str, option: str) -> str:
    """Returns the URL after validating it. `option`: the option that contains the URL, for error
    messages.

    Raises ConfigError if the URL is invalid, or contains a user name or password, which would be
    stored with the config.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        fits = False
    if not fits:
        raise ConfigError(f"{option}: url must be http://host:port/path, or https://...")
    if parts.username or parts.password:
        raise ConfigError(
            f"{option}: url holds a user or a password. Put a key in a variable that key_env names."
        )
    return url


def bearer(key_env: str, option: str) -> dict[str, str]:
    """Returns the HTTP authorization header with the key in the environment variable `key_env`; an
    empty dictionary if `key_env` is "".

    `option`: the option that names the variable, for error messages. Raises ConfigError, which does
    not show the key, if the variable is empty or contains characters that are invalid in a header.
    """
    if not key_env:
        return {}
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ConfigError(f"{option}: the environment variable {key_env} (key_env) is not set.")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{option}: {key_env} (key_env) holds what can't be sent in a header.")
    return {"authorization": f"Bearer {key}"}
