"""Remote reward: requests rewards from a server over HTTP."""

import json
import math
import time
from collections.abc import Sequence

import httpx

from rftmega.core.errors import RewardError
from rftmega.rewards.part import Answer, Decode

LONGEST_PAUSE = 30.0  # seconds between two attempts
LARGEST_REPLY = 16 << 20  # bytes
SHOWN = 200  # characters of a reply that an error quotes


class RemotePart:
    """RemotePart is the reward component that posts {"prompts", "responses", "labels", "kinds"},
    lists of strings, to a reward server, whose reply is {"rewards": [float, ...]}.
    """

    def __init__(
        self,
        url: str,
        decode: Decode,
        *,
        timeout: float,
        retries: int,
        batch: int,
        pause: float = 0.5,
    ):
        """`timeout`: seconds per attempt. After a failed attempt, up to `retries` more follow, the
        first after `pause` seconds, each further one after twice the previous pause. `batch`:
        maximum responses per request.
        """
        self.url, self.decode, self.batch = url, decode, batch
        self.timeout, self.retries, self.pause = timeout, retries, pause
        # without secrets
        self.address = str(
            httpx.URL(url).copy_with(username=None, password=None, query=None, fragment=None)
        )
        self.client = httpx.Client(timeout=timeout)

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """Returns the server's rewards, one per response. Raises RewardError if all attempts of a
        request fail, or a reply has no valid rewards.
        """
        starts = range(0, len(answers), self.batch)
        return [
            reward
            for start in starts
            for reward in self._rewards(answers[start : start + self.batch])
        ]

    def _rewards(self, answers: Sequence[Answer]) -> list[float]:
        question = {
            "prompts": [self.decode(answer.prompt_ids) for answer in answers],
            "responses": [answer.response for answer in answers],
            "labels": [answer.label for answer in answers],
            "kinds": [answer.kind for answer in answers],
        }
        try:
            return read_rewards(self._post(json.dumps(question).encode()), len(answers))
        except ValueError as error:
            raise RewardError(
                f"The reward server {self.address} was asked about {len(answers)} completions: {error}"
            ) from error

    def _post(self, question: bytes) -> str:
        """Sends the request body `question`, with retries, and returns the text of the reply.

        Raises RewardError if all attempts fail; ValueError if another attempt would not help.
        """
        failures = []
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                status, reply = self._attempt(question)
            except httpx.TransportError as error:  # no connection, a lost one, a time-out
                failures.append(f"{type(error).__name__}: {error}")
                continue
            if status == 200:
                return reply
            if status != 429 and status < 500:
                raise ValueError(f"status {status}, {_quoted(reply)}.")
            failures.append(f"status {status}, {_quoted(reply)}")
        raise RewardError(
            f"The reward server {self.address} gave nothing in {len(failures)} attempt(s) of at most {self.timeout:g} s; "
            f"the last: {failures[-1]}. Is it up? Otherwise raise reward.remote_timeout or reward.remote_retries."
        )

    def _attempt(self, question: bytes) -> tuple[int, str]:
        """Sends the request body `question` once and returns (status code, text of the reply).
        Raises ReadTimeout if the whole reply takes longer than the timeout; httpx's own timeout
        applies between two reads.
        """
        end = time.monotonic() + self.timeout
        reply = b""
        with self.client.stream(
            "POST", self.url, content=question, headers={"content-type": "application/json"}
        ) as response:
            for piece in response.iter_bytes():
                reply += piece
                if len(reply) > LARGEST_REPLY:
                    raise ValueError(f"the reply is longer than {LARGEST_REPLY} bytes.")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("the reply trickles in")
            return response.status_code, reply.decode(errors="replace")


def read_rewards(reply: str, count: int) -> list[float]:
    """Returns the rewards in a reply.

    Raises ValueError with the reason if the reply does not have `count` finite numbers.
    """
    try:
        held = json.loads(reply)
    except (ValueError, RecursionError):
        raise ValueError(f"the reply is not JSON: {_quoted(reply)}.") from None
    rewards = held.get("rewards") if isinstance(held, dict) else None
    if not isinstance(rewards, list):
        raise ValueError(f'the reply is no object with a list "rewards": {_quoted(reply)}.')
    if len(rewards) != count:
        raise ValueError(f"the reply holds {len(rewards)} rewards.")
    for place, reward in enumerate(rewards):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not _finite(reward):
            raise ValueError(
                f"reward {place} of the reply is {str(reward)[:SHOWN]!r}, not a finite number."
            )
    return [float(reward) for reward in rewards]


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # JSON integers are unbounded
        return False


def _quoted(reply: str) -> str:
    return repr(reply[:SHOWN]) + ("..." if len(reply) > SHOWN else "")
