"""ASCII characters as numbers: compiled code compares octets with numbers."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BACKSLASH",
    "CLOSING_BRACE",
    "CLOSING_BRACKET",
    "COLON",
    "COMMA",
    "EQUALS",
    "HYPHEN",
    "LINE_FEED",
    "LOWER",
    "LOWER_A",
    "LOWER_E",
    "LOWER_F",
    "LOWER_J",
    "LOWER_N",
    "LOWER_T",
    "LOWER_U",
    "LOWER_Z",
    "NINE",
    "NOT_ASCII",
    "OPENING_BRACE",
    "OPENING_BRACKET",
    "PERCENT",
    "PLUS",
    "POINT",
    "QUOTE",
    "RETURN",
    "SEMICOLON",
    "SPACE",
    "TAB",
    "TILDE",
    "UNDERSCORE",
    "UPPER_A",
    "UPPER_D",
    "UPPER_N",
    "UPPER_T",
    "UPPER_Z",
    "ZERO",
]

TAB: Final = ord("\t")
LINE_FEED: Final = ord("\n")
RETURN: Final = ord("\r")
SPACE: Final = ord(" ")
"""What is below are control characters."""
QUOTE: Final = ord('"')
PERCENT: Final = ord("%")
PLUS: Final = ord("+")
COMMA: Final = ord(",")
HYPHEN: Final = ord("-")
POINT: Final = ord(".")
ZERO: Final = ord("0")
NINE: Final = ord("9")
COLON: Final = ord(":")
SEMICOLON: Final = ord(";")
EQUALS: Final = ord("=")
UPPER_A: Final = ord("A")
UPPER_D: Final = ord("D")
UPPER_N: Final = ord("N")
UPPER_T: Final = ord("T")
UPPER_Z: Final = ord("Z")
OPENING_BRACKET: Final = ord("[")
BACKSLASH: Final = ord("\\")
CLOSING_BRACKET: Final = ord("]")
UNDERSCORE: Final = ord("_")
LOWER_A: Final = ord("a")
LOWER_E: Final = ord("e")
LOWER_F: Final = ord("f")
LOWER_J: Final = ord("j")
LOWER_N: Final = ord("n")
LOWER_T: Final = ord("t")
LOWER_U: Final = ord("u")
LOWER_Z: Final = ord("z")
OPENING_BRACE: Final = ord("{")
CLOSING_BRACE: Final = ord("}")
TILDE: Final = ord("~")
"""The last character that can be printed."""

NOT_ASCII: Final = 0x80
"""The first octet that is no ASCII character."""
LOWER: Final = 0x20
"""The bit that distinguishes a lower-case letter from the upper-case one."""
