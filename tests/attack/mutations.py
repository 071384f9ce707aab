"""Mutations: ways to damage bytes, tables and JSON values, drawn by a seeded generator."""

import copy
import json
import random
import struct
from typing import Any

from attacking import CANARY

_WORDS = (
    "", " ", "nan", "NaN", "inf", "-inf", "1e999", "-1e39", "1e-400", "3O", "1,5", "1_000", "0x10", "٣", "-0", "+", "-",
    "9" * 400, "null", "?", "true", "a" * 5000, "\x00", "\x1b[31mred\x1b[0m", "\u202e", "\ud7ff", "=cmd()", "'; drop", '"',
    '""', "\n", "\r", "\t", ";", "|", "#", "a=b", "=", "../../etc/passwd", "/dev/zero", "%s%n", "{0}", "None", "🙂",
    f"{CANARY}:run", "os:abort", "__import__('os')", "sys:exit", "file:///etc/passwd", "http://127.0.0.1:9/x", "~root",
)  # fmt: skip
_NUMBERS = (
    0, -1, 1, 2, 3, 0.5, -0.5, 1e308, 1e-308, 2**31, 2**63, -(2**63), 2**64, 10**15, 10**400, 255, 256, float("nan"),
    float("inf"),
)  # fmt: skip


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four kinds of damage."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = _damaged_once(content, rng)
    return content


def _damaged_once(content: bytes, rng: random.Random) -> bytes:
    size = len(content)
    if size == 0:
        return rng.randbytes(rng.randrange(40))
    start = rng.randrange(size) if rng.random() < 0.5 else rng.randrange(min(size, 200))  # headers stand in front
    length = min(rng.choice((1, 2, 4, 8, 30, 500)), size - start)
    end = start + length
    match rng.randrange(10):
        case 0:  # flipped bits
            return content[:start] + bytes([content[start] ^ (1 << rng.randrange(8))]) + content[start + 1 :]
        case 1:
            return content[:start] + rng.randbytes(length) + content[end:]
        case 2:
            return content[:start] + bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))]) * length + content[end:]
        case 3:
            return content[:start]
        case 4:
            return content[:start] + content[end:]
        case 5:
            return content[:end] + content[start:end] * rng.choice((1, 2, 50)) + content[end:]
        case 6:
            return content[:start] + rng.randbytes(rng.choice((1, 3, 100))) + content[start:]
        case 7:  # a number, of either byte order
            form = rng.choice(("<I", ">I", "<Q", ">Q", "<H", ">H", "<d", "<f"))
            number = rng.choice((0, 1, 255, 2**15, 2**16 - 1, 65_000))
            large = form[1] in "IQ" and rng.random() < 0.7
            packed = struct.pack(form, rng.choice((2**31 - 1, 2**31, 2**32 - 1)) if large else number)
            return content[:start] + packed + content[start + len(packed) :]
        case 8:
            other = rng.randrange(size)
            return content[:start] + content[other : other + length] + content[end:]
        case _:
            return rng.choice((content[end:], content + content, b"", content[::-1], content[:end]))


def damaged_text(text: str, rng: random.Random) -> bytes:
    """A table as text, with cells, lines, delimiters or bytes of it changed."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        lines = text.split("\n")
        row = rng.randrange(len(lines)) if rng.random() < 0.8 else 0
        cells = lines[row].split(",")
        column = rng.randrange(len(cells))
        match rng.randrange(9):
            case 0 | 1 | 2:
                cells[column] = rng.choice(_WORDS)
                lines[row] = ",".join(cells)
            case 3:
                cells.insert(column, rng.choice(_WORDS))
                lines[row] = ",".join(cells)
            case 4:
                del cells[column]
                lines[row] = ",".join(cells)
            case 5:
                lines[row:row] = [lines[row]] * rng.choice((1, 3))
            case 6:
                del lines[row : row + rng.choice((1, 3, 100))]
            case 7:
                delimiter = rng.choice((";", "\t", "|", ", ", '","', ",,"))
                lines = [line.replace(",", delimiter) for line in lines]
            case _:  # a whole column
                word = rng.choice(_WORDS)
                lines = [
                    ",".join([*line.split(",")[:column], word, *line.split(",")[column + 1 :]]) if i else line
                    for i, line in enumerate(lines)
                ]
        text = rng.choice(("\n", "\n", "\n", "\r\n", "\r")).join(lines)
    content = text.encode("utf-8", "surrogatepass")
    match rng.randrange(8):
        case 0:
            return damaged(content, rng)
        case 1:
            return text.encode(rng.choice(("utf-16", "latin-1", "utf-8-sig")), "replace")
        case _:
            return content


def damaged_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with some of its parts replaced, removed, added or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return rng.choice(_WORDS)
        parent, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[rng.choice(_WORDS)] = parent.pop(key)
            case 2 if isinstance(parent, list):
                parent[key:key] = [copy.deepcopy(parent[key])] * rng.choice((1, 30))
            case 3:
                parent[key] = {rng.choice(_WORDS): parent[key]}
            case 4:
                parent[key] = [parent[key]]
            case 5:
                other, there = rng.choice(places)
                parent[key] = copy.deepcopy(_safe(other, there))
            case _:
                parent[key] = rng.choice((*_WORDS, *_NUMBERS, None, True, False, [], {}, [[]], [None], {"a": 1}))
    return value


def damaged_json(value: Any, rng: random.Random) -> bytes:
    """A JSON file of a damaged value; sometimes the bytes are damaged instead, or it is nested without end."""
    if rng.random() < 0.05:
        depth = rng.choice((500, 5000, 200_000))
        return rng.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth))
    if rng.random() < 0.2:
        return damaged(json.dumps(value).encode(), rng)
    return json.dumps(damaged_value(value, rng)).encode("utf-8", "surrogatepass")


def word(rng: random.Random) -> str:
    """A text that somebody may have put where another was expected."""
    return rng.choice((*_WORDS, *map(str, _NUMBERS)))


def _places(value: Any) -> Any:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield value, key
        yield from _places(child)


def _safe(parent: Any, key: Any) -> Any:
    try:
        return parent[key]
    except (KeyError, IndexError):  # removed since
        return None
