"""Messages that went wrong on their way."""

from __future__ import annotations

import random


def mutated(frame: bytes, chance: random.Random) -> bytes:
    """A message changed in one of many ways: bits, bytes, pieces left out, doubled, swapped, nested deep, cut short."""
    data = bytearray(frame)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.randrange(1, 9))
        match chance.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(data):
                data[at] = chance.randrange(256)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * chance.randrange(1, 4)
            case 4:
                data[at:at] = chance.randbytes(chance.randrange(1, 16))
            case 5:
                data[at:at] = bytes([chance.choice((0x81, 0x91, 0xDF, 0xC7, 0xDB))]) * chance.choice((1, 5, 2000))
            case _:
                del data[at:]
    return bytes(data)
