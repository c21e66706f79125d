"""Print the hash of a user's token for `token_hash` in the configuration."""

from __future__ import annotations

import argparse
import getpass
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from crosswire import config as configuration
from crosswire.cli.hub import print_json
from crosswire.cli.parsers import add_action, add_actions
from crosswire.errors import ClientError
from crosswire.tokens import SHORTEST_TOKEN, TokenHash, hash_token

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    action = add_action(
        add_actions(parser),
        "hash",
        "the hash of a token, which is read from standard input, never from the command line, "
        "where other users of the machine could see it",
        "crosswire user hash --generate",
        "crosswire user hash --config crosswire.toml < token.txt",
    )
    action.add_argument(
        "--generate", action="store_true", help="make a new token, and print it with its hash"
    )
    action.add_argument(
        "--config",
        metavar="FILE",
        help="use the salt of this file's first hash: sign-ins are cheapest if all have the same",
    )
    action.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the hash. Raises ConfigError, and ClientError for a token that is too short."""
    token = secrets.token_urlsafe(32) if options.generate else _read_token()
    if len(token) < SHORTEST_TOKEN:
        raise ClientError(f"the token is too short: use {SHORTEST_TOKEN} characters or more")
    text = str(hash_token(token, _like(options.config)))
    if options.json:
        print_json(
            {"token": token, "token_hash": text} if options.generate else {"token_hash": text}
        )
    elif options.generate:
        print(f"token       {token}\ntoken_hash  {text}")
    else:
        print(text)
    return 0


def _read_token() -> str:
    if sys.stdin.isatty():
        return getpass.getpass("token: ")
    return sys.stdin.readline().strip()


def _like(file: str | None) -> TokenHash | None:
    if file is None:
        return None
    users = configuration.load(Path(file)).users
    hashes = [user.token_hash for user in users if user.token_hash is not None]
    return TokenHash.parse(hashes[0]) if hashes else None
