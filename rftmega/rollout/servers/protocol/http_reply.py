"""HTTP requests to a server whose reply may come from a proxy or be truncated."""

import time
from typing import Any, NamedTuple

import httpx

from rftmega.core.json_files import kind_of, parse_json

# exceptions of an exchange that broke off or returned invalid HTTP or a wrong encoding
BROKEN = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)
MOST_BYTES = 2**28
SHOWN = 500  # bytes of a body, in a message


class HTTPReply(NamedTuple):
    """HTTPReply is the status and body of a server's reply."""

    status: int
    body: bytes

    def read(self) -> dict[str, Any]:
        """Parses the body as a JSON object, and returns it. Raises ValueError for any other
        content.
        """
        found = parse_json(self.body)
        if not isinstance(found, dict):
            raise ValueError(f"it is {kind_of(found)}")
        return found

    def __str__(self) -> str:
        said = self.body[:SHOWN].decode(errors="replace")
        return f"status {self.status}, {said!r}"


def asked(method: str, url: str, seconds: float, **given: Any) -> HTTPReply:
    """Sends an HTTP request and returns the reply, which must be complete within about `seconds`.
    `method`: GET or POST; `given`: further arguments of `httpx.stream`. Raises an exception in
    BROKEN if there is no complete reply.
    """
    end = time.monotonic() + seconds
    body = bytearray()
    # no proxy may see the key
    with httpx.stream(method, url, timeout=seconds, trust_env=False, **given) as response:
        for part in response.iter_bytes():
            body += part
            if len(body) > MOST_BYTES:
                raise ValueError(f"its reply has more than {MOST_BYTES} bytes")
            if time.monotonic() > end:
                raise TimeoutError(f"its reply had not ended after {seconds:g} s")
    return HTTPReply(response.status_code, bytes(body))
