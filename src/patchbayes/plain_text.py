"""Texts of strangers: class names, file names and notes may hold characters that command a terminal or disturb a page."""

import unicodedata

_DIRECTIONS = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def clean(text: str) -> str:
    """The text with U+FFFD in place of what could disturb a page or command a terminal.

    That is: control characters other than newline and tab, lone surrogates, and marks that reverse the writing direction.
    """
    return "".join("\N{REPLACEMENT CHARACTER}" if _disturbs(character) else character for character in text)


def escaped(json_text: str) -> str:
    """A JSON text with such characters written as escapes, which mean the same."""
    return "".join(f"\\u{ord(character):04x}" if _disturbs(character) else character for character in json_text)


def _disturbs(character: str) -> bool:
    if character.isascii():
        return (character < " " and character not in "\n\t") or character == "\x7f"
    return unicodedata.category(character) in ("Cc", "Cs") or character in _DIRECTIONS
