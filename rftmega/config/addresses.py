"""Addresses of servers, as options and server lists have them."""

from urllib.parse import urlsplit


def address_of(text: str) -> str:
    """Returns a server's address as all of its spellings have it: `http://h:1/` is `http://h:1`.

    Raises ValueError where it is none.
    """
    parts = urlsplit(text)
    host, port = parts.hostname, parts.port  # ValueError where it is no number
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
