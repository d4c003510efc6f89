"""Client of an OpenAI-compatible chat completions API."""

import json
import os
import threading
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from rftmega.core.errors import ConfigError, RewardError

PATH = "/chat/completions"
LONGEST_PAUSE = 60.0  # seconds between two attempts, unless the server says more
LONGEST_WAIT = 600.0  # seconds that a server may ask to wait for (Retry-After)
LARGEST_REPLY = 4 << 20  # bytes
SHOWN = 200  # characters of a reply that an error quotes
# status codes that concern one question, such as a too long one; other codes concern all questions
OF_THE_QUESTION = (400, 413, 422)


class Refused(Exception):  # noqa: N818  named after the event
    """Raised if the server rejects one request for its content, so that other requests may still
    succeed.
    """


class Pace:
    """Pace limits the rate at which requests are sent."""

    def __init__(self, per_second: float):
        """`per_second`: maximum number of requests per second; 0: unlimited."""
        self._interval = 1 / per_second if per_second else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits until the calling thread may send its request."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._interval
        time.sleep(turn - now)


class ChatEndpoint:
    """ChatEndpoint sends requests to a chat completions API, with retries and a rate limit; several
    threads may share it.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout: float,
        retries: int,
        per_second: float = 0.0,
        pause: float = 0.5,
    ):
        """`url`: address of the API or of its chat completions. `key`: a bearer token; "": none.
        `timeout`: seconds per attempt. After a failed attempt, up to `retries` more follow, the
        first after `pause` seconds, each further one after twice the previous pause. `per_second`:
        maximum requests per second; 0: unlimited.
        """
        self._url = url if url.endswith(PATH) else url.rstrip("/") + PATH
        # without secrets
        self.address = str(httpx.URL(self._url).copy_with(query=None, fragment=None))
        self._timeout, self._retries, self._pause = timeout, retries, pause
        self._pace = Pace(per_second)
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.Client(timeout=timeout, headers=headers, limits=httpx.Limits())

    def answer(self, asked: dict[str, Any]) -> str:
        """Sends the request body `asked` and returns the text of the first choice; "" if it has no
        text.

        Raises Refused if the server rejects this request for its content, and RewardError if the
        server would reject every request or no attempt succeeds.
        """
        content, failures = json.dumps(asked).encode(), []
        pause = 0.0
        for attempt in range(self._retries + 1):
            time.sleep(pause)
            self._pace.wait()
            pause = min(self._pause * 2**attempt, LONGEST_PAUSE)
            try:
                status, reply, wait = self._attempt(content)
            except httpx.TransportError as error:  # no connection, a lost one, a time-out
                failures.append(f"{type(error).__name__}: {error}")
                continue
            if status == 200:
                return self._read(reply)
            if status in OF_THE_QUESTION:
                raise Refused(f"status {status}, {_quoted(reply)}")
            if status != 429 and status < 500:
                raise RewardError(
                    f"The judge {self.address} answers with status {status}, {_quoted(reply)}. Look at reward.judge_url, "
                    "reward.judge_model and the key (reward.judge_key_env)."
                )
            failures.append(f"status {status}, {_quoted(reply)}")
            pause = max(pause, wait)
        raise RewardError(
            f"The judge {self.address} gave nothing in {len(failures)} attempt(s) of at most {self._timeout:g} s; the last: "
            f"{failures[-1]}. Is it up? Otherwise raise reward.judge_timeout or reward.judge_retries, or lower "
            "reward.judge_per_second."
        )

    def _attempt(self, content: bytes) -> tuple[int, str, float]:
        """Sends the request body `content` once. Returns the reply's status code, its text, and the
        seconds that the server asks to wait before the next attempt. Raises ReadTimeout if the
        whole reply takes longer than the timeout.
        """
        end, reply = time.monotonic() + self._timeout, bytearray()
        with self._client.stream("POST", self._url, content=content) as response:
            for piece in response.iter_bytes():
                reply += piece
                if len(reply) > LARGEST_REPLY:
                    raise Refused(f"the reply is longer than {LARGEST_REPLY} bytes")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("the reply trickles in")
            wait = waiting_time(response.headers.get("retry-after", ""))
            return response.status_code, reply.decode(errors="replace"), wait

    def _read(self, reply: str) -> str:
        try:
            said = json.loads(reply)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise RewardError(
                f"The judge {self.address} gave no chat completion: {_quoted(reply)}. Is reward.judge_url that of an API like "
                "OpenAI's?"
            ) from None
        return said if isinstance(said, str) else ""


def key_of(variable: str) -> str:
    """Returns the API key in the environment variable `variable`; "" if `variable` is empty.

    Raises ConfigError, which does not show the key, if the variable is not set or its value cannot
    be sent in a header.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"reward.judge_key_env={variable}: there is no key in this environment variable."
        )
    return key


def waiting_time(retry_after: str) -> float:
    """Returns the waiting time in seconds of a Retry-After header (seconds or a date), at most
    LONGEST_WAIT; 0 if the header cannot be parsed.
    """
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            then = parsedate_to_datetime(retry_after)
        except ValueError:
            return 0.0
        then = then if then.tzinfo else then.replace(tzinfo=UTC)
        seconds = (then - datetime.now(UTC)).total_seconds()
    # False for NaN
    return min(seconds, LONGEST_WAIT) if seconds > 0 else 0.0


def _quoted(reply: str) -> str:
    return repr(reply[:SHOWN]) + ("..." if len(reply) > SHOWN else "")
