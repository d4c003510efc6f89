"""Normalisation of server addresses in options and server lists."""

from urllib.parse import urlsplit


def address_of(text: str) -> str:
    """Returns the canonical form of a server's address: `http://h:1/` becomes `http://h:1`.

    Raises ValueError if the address is invalid.
    """
    parts = urlsplit(text)
    host, port = parts.hostname, parts.port  # ValueError if it is not a number
    plain = all("!" <= letter <= "~" for letter in text)
    if not plain or parts.scheme not in ("http", "https") or not host or not port:
        raise ValueError("it needs http or https, a host and a port")
    if "@" in parts.netloc:
        raise ValueError(
            "it has a user or password; the key of the environment is all that servers ask for"
        )
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("it has more than scheme, host and port")
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}:{port}"
