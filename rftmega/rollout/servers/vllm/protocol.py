"""WebSocket protocol between the trainer and a server that runs this package. Each message is a
MessagePack list of requests or of replies; many requests run at the same time.
"""

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

SOCKET = "/completions"  # the path
ProtocolError = msgspec.MsgspecError


class Ask(msgspec.Struct, array_like=True, tag=0):
    """Ask is the message that requests one completion."""

    number: int  # the request's sequence number and the checksum of its prompt (`numbered`)
    token_ids: bytes  # int32 in native byte order, equal on both sides
    sampling: dict[str, Any]  # arguments of vLLM's SamplingParams
    salt: str = ""  # requests with different salts share no prefix cache
    adapter: int = 0  # number of the adapter; 0: the base model


class Cancel(msgspec.Struct, array_like=True, tag=1):
    """Cancel is the message that aborts a running request, named by its number."""

    number: int


class ServerReply(msgspec.Struct, array_like=True, tag=0):
    """ServerReply is the message with the completion of a request, or with the part generated so
    far if the request was aborted.
    """

    number: int
    token_ids: bytes  # int32
    logprobs: bytes  # float32, of each token
    reason: str  # stop, length or abort
    spans: list[tuple[str, int, int]]  # weight version, first token, end
    routes: bytes = (
        b""  # uint8 or int16 [tokens fed, layers, experts a token], if the server returns them
    )
    shape: list[int] = []  # of the routes


class Failure(msgspec.Struct, array_like=True, tag=1):
    """Failure is the message that a request has no completion, with the reason."""

    number: int
    error: str
    refused: bool  # the request is invalid, and every server would refuse it


_asked = msgspec.msgpack.Decoder(list[Ask | Cancel])
_answered = msgspec.msgpack.Decoder(list[ServerReply | Failure])
_encoder = msgspec.msgpack.Encoder()


def packed(messages: Sequence[Ask | Cancel] | Sequence[ServerReply | Failure]) -> bytes:
    return _encoder.encode(messages)


def asked(message: bytes | str) -> list[Ask | Cancel]:
    """Decodes a WebSocket message from the trainer to its requests. Raises ProtocolError if it is
    invalid.
    """
    return _decoded(_asked, message)


def answered(message: bytes | str) -> list[ServerReply | Failure]:
    """Decodes a WebSocket message from the server to its replies. Raises ProtocolError if it is
    invalid.
    """
    return _decoded(_answered, message)


def _decoded(decoder: "msgspec.msgpack.Decoder[Any]", message: bytes | str) -> Any:
    if isinstance(message, str):
        raise ProtocolError("it is text, and no MessagePack")
    try:
        return decoder.decode(message)
    except (ValueError, RecursionError) as error:  # invalid text, or too deep nesting
        raise ProtocolError(str(error)) from error


def numbered(sequence: int, token_ids: bytes) -> int:
    """Returns the number of a request: its sequence number combined with a checksum of its prompt
    (`token_ids`: int32 bytes), so that a completion of another prompt never matches.
    """
    return sequence << 32 | zlib.crc32(token_ids)


def renumbered(number: int, answered_ids: Sequence[int]) -> int:
    """Returns the number for the reply to the request with number `number`. `answered_ids`: the
    prompt whose completion the reply has; the numbers are equal only if it is the request's prompt.
    """
    return numbered(number >> 32, integers(answered_ids))


def integers(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def numbers(kind: str, content: bytes) -> "array[Any]":
    """Decodes bytes as an array of numbers. `kind`: type code of Python's array module, "i" for
    int32 or "f" for float32; `content`: the bytes.
    """
    found: array[Any] = array(kind)
    found.frombytes(content)
    return found
