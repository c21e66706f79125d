"""The tokens of a .bond file, each with its line and column."""

from __future__ import annotations

import re
from typing import Final, Literal, cast

import msgspec

from crosswire.errors import BondSyntaxError

__all__ = ["SourcePosition", "Token", "tokenize", "unescape"]

Kind = Literal["name", "integer", "float", "string", "symbol", "end"]


class SourcePosition(msgspec.Struct, frozen=True):
    """A position in a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def error(self, reason: str, *, expected: str = "") -> BondSyntaxError:
        """A BondSyntaxError at this position."""
        return BondSyntaxError(
            reason, file=self.file, line=self.line, column=self.column, expected=expected
        )


class Token(msgspec.Struct, frozen=True):
    """`text` is the source text; of a string, that between the quotes."""

    kind: Kind
    text: str
    at: SourcePosition

    def __str__(self) -> str:
        if self.kind == "end":
            return "the end of the file"
        return f'"{self.text}"' if self.kind == "string" else f"'{self.text}'"


_TOKEN: Final = re.compile(
    r"""
      (?P<space>   [\s\ufeff]+ )
    | (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<float>   [+-]?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+)(?!\w) )
    | (?P<integer> [+-]?(?:0[xX][0-9a-fA-F]+|0[oO][0-7]+|\d+)(?!\w) )
    | (?P<name>    bond_meta::\w+ | [^\W\d]\w* )
    | (?P<string>  "(?:[^"\\\n]++|\\.)*+" )
    | (?P<symbol>  [{}<>()\[\]:;,=.] )
    """,
    re.VERBOSE | re.DOTALL,
)

_MAX_NUMBER_CHARS: Final = 100
_MAX_NAME_CHARS: Final = 1_000

_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|([0-9]+)|(.))", re.DOTALL)
_ESCAPED: Final = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "&": "",
}


def tokenize(text: str, file: str) -> list[Token]:
    """All tokens of `text`, and one of kind `end`. Raises BondSyntaxError."""
    tokens: list[Token] = []
    pos, line, line_start = 0, 1, 0
    while pos < len(text):
        at = SourcePosition(file, line, pos - line_start + 1)
        found = _TOKEN.match(text, pos)
        if found is None:
            raise _stray(text, pos, at)
        kind, word = found.lastgroup, found.group()
        if kind in ("integer", "float") and len(word) > _MAX_NUMBER_CHARS:
            raise at.error(f"a number of {len(word)} characters")
        if kind == "name" and len(word) > _MAX_NAME_CHARS:
            raise at.error(f"a name of {len(word)} characters")
        if kind not in ("space", "comment"):
            # In L"text" the L is a name directly before a string: only defaults allow it.
            content = word[1:-1] if kind == "string" else word
            tokens.append(Token(cast(Kind, kind), content, at))
        newlines = word.count("\n")
        if newlines:
            line += newlines
            line_start = pos + word.rindex("\n") + 1
        pos = found.end()
    tokens.append(Token("end", "", SourcePosition(file, line, pos - line_start + 1)))
    return tokens


def _stray(text: str, pos: int, at: SourcePosition) -> BondSyntaxError:
    if text.startswith("/*", pos):
        return at.error("a comment without an end", expected="*/")
    if text.startswith('"', pos):
        return at.error("a string without an end", expected='"')
    return at.error(f"{text[pos]!r} does not belong here")


def unescape(token: Token) -> str:
    """The value of a string token. Raises BondSyntaxError for unknown escapes."""

    def replace(found: re.Match[str]) -> str:
        hexadecimal, short, decimal, char = found.groups()
        if char is not None:
            if char not in _ESCAPED:
                raise token.at.error(f"unknown escape \\{char} in a string")
            return _ESCAPED[char]
        digits = decimal or hexadecimal or short
        if len(digits) > _MAX_NUMBER_CHARS:
            raise token.at.error(f"a number of {len(digits)} characters")
        number = int(digits, 10 if decimal is not None else 16)
        if number > 0x10FFFF:
            raise token.at.error(f"{found.group()} is no character")
        return chr(number)

    value = _ESCAPE.sub(replace, token.text)
    try:
        # Two escapes may be the halves of one character in UTF-16; one half alone is none.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise token.at.error("half of a character in a string") from error
