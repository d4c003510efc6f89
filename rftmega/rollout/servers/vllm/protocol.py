"""Wire says what a trainer and a server of its own say to each other: MessagePack over one WebSocket,
many requests at a time, each message a list of them.
"""

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

SOCKET = "/completions"  # the path
ProtocolError = msgspec.MsgspecError


class Ask(msgspec.Struct, array_like=True, tag=0):
    """Ask asks for one completion."""

    number: int  # of the request in its connection, and its prompt (`numbered`)
    token_ids: bytes  # int32, of the machine's byte order: both are on machines of one kind
    sampling: dict[str, Any]  # what vLLM's SamplingParams takes
    salt: str = ""  # contexts with different ones share no cache
    adapter: int = 0  # whose answer it is; 0: the model's by itself


class Cancel(msgspec.Struct, array_like=True, tag=1):
    """Cancel takes a request back."""

    number: int


class ServerReply(msgspec.Struct, array_like=True, tag=0):
    """ServerReply is the completion that was asked for, or what of it there was when it was aborted."""

    number: int
    token_ids: bytes  # int32
    logprobs: bytes  # float32, of each token
    reason: str  # stop, length or abort
    spans: list[tuple[str, int, int]]  # version of the weights, first token, token behind the last
    routes: bytes = (
        b""  # uint8 or int16 [tokens fed, layers, experts a token], where the server tells
    )
    shape: list[int] = []  # of the routes


class Failure(msgspec.Struct, array_like=True, tag=1):
    """Failure says why there is no completion."""

    number: int
    error: str
    refused: bool  # the request is at fault, and would be refused everywhere


_asked = msgspec.msgpack.Decoder(list[Ask | Cancel])
_answered = msgspec.msgpack.Decoder(list[ServerReply | Failure])
_encoder = msgspec.msgpack.Encoder()


def packed(messages: Sequence[Ask | Cancel] | Sequence[ServerReply | Failure]) -> bytes:
    return _encoder.encode(messages)


def asked(message: bytes | str) -> list[Ask | Cancel]:
    """Raises ProtocolError for anything else."""
    return _decoded(_asked, message)


def answered(message: bytes | str) -> list[ServerReply | Failure]:
    """Raises ProtocolError for anything else."""
    return _decoded(_answered, message)


def _decoded(decoder: "msgspec.msgpack.Decoder[Any]", message: bytes | str) -> Any:
    if isinstance(message, str):
        raise ProtocolError("it is text, and no MessagePack")
    try:
        return decoder.decode(message)
    except (ValueError, RecursionError) as error:  # bytes that are no text, lists without an end
        raise ProtocolError(str(error)) from error


def numbered(sequence: int, token_ids: bytes) -> int:
    """Returns the number of a request, in which its prompt is: an answer to another one does not have
    it.
    """
    return sequence << 32 | zlib.crc32(token_ids)


def renumbered(number: int, answered_ids: Sequence[int]) -> int:
    """Returns the number under which the answer to this prompt goes: the request's own where it is
    the request's.
    """
    return numbered(number >> 32, integers(answered_ids))


def integers(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def numbers(kind: str, content: bytes) -> "array[Any]":
    """Reads an array of this type code."""
    found: array[Any] = array(kind)
    found.frombytes(content)
    return found
