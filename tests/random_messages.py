"""Random protobuf messages: any value that the wire can carry, with a taste for extremes."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

MAX_DEPTH = 5

_F = FieldDescriptor
_BOUNDS: dict[int, tuple[int, int]] = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 2**64 - 1),
    _F.CPPTYPE_ENUM: (-1, 40),
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 3e38, float("inf"), float("-inf"), float("nan"))


class RandomMessages:
    """Makes messages from one seed.

    Args:
        words: texts that mean something to the service, such as names of workers.
    """

    def __init__(self, seed: int, words: tuple[str, ...] = ()) -> None:
        self.random = random.Random(seed)
        self._words = ("", "a", "ä\x00\U0001f600", "127.0.0.1", "x" * 5000, *words)

    def make(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """A message of a type; fields may be missing, repeated or senseless."""
        message = GetMessageClass(descriptor)()
        density = self.random.choice((0.2, 0.7, 1.0))
        for field in descriptor.fields:
            if self.random.random() < density and not (field.message_type and depth >= MAX_DEPTH):
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: Any, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return
        if not field.is_repeated:
            if field.message_type is not None:
                getattr(message, field.name).CopyFrom(self.make(field.message_type, depth + 1))
            else:
                setattr(message, field.name, self._value(field))
            return
        for _ in range(self.random.choice((0, 1, 2, 2, 3, 20))):
            if field.message_type is not None:
                getattr(message, field.name).append(self.make(field.message_type, depth + 1))
            else:
                getattr(message, field.name).append(self._value(field))

    def _value(self, field: Any) -> Any:
        draw = self.random
        kind = field.cpp_type
        if kind == _F.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if kind in (_F.CPPTYPE_FLOAT, _F.CPPTYPE_DOUBLE):
            return draw.choice((*_FLOATS, draw.uniform(-2, 2)))
        if kind == _F.CPPTYPE_STRING:
            if field.type == _F.TYPE_BYTES:
                return draw.randbytes(draw.choice((0, 1, 15, 16, 32, 160, 5000)))
            return draw.choice(self._words)
        low, high = _BOUNDS[kind]
        return draw.choice((low, high, 0, min(high, 1), draw.randint(max(low, -5), 200)))

    def damaged(self, raw: bytes) -> bytes:
        """Bytes that were a message before something happened to them."""
        data = bytearray(raw or self.random.randbytes(20))
        for _ in range(self.random.randint(1, 8)):
            data[self.random.randrange(len(data))] = self.random.randrange(256)
        return bytes(data[: self.random.randint(0, len(data))])
