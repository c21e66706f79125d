"""Tokens and their hashes: who has one, at which cost."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from crosswire.access import Access, User
from crosswire.config import check
from crosswire.tokens import TokenHash, Tokens, hash_token
from tests.cli.conftest import answer, crosswire

TOKEN = "a-secret-of-anna"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The tokens that were hashed."""
    found: list[bytes] = []
    scrypt = hashlib.scrypt

    def counted(token: bytes, **options: Any) -> bytes:
        found.append(token)
        return scrypt(token, **options)

    monkeypatch.setattr(hashlib, "scrypt", counted)
    return found


def test_a_hash_is_found_by_its_token() -> None:
    access = Access((User(name="anna", token_hash=str(hash_token(TOKEN))),))
    assert access.by_token(TOKEN) == "anna"
    assert access.by_token(TOKEN + "x") is None
    assert access.by_token("\ud800") is None


def test_hashes_have_salts() -> None:
    assert hash_token(TOKEN) != hash_token(TOKEN)
    first = hash_token(TOKEN)
    assert hash_token(TOKEN, first) == first
    assert TokenHash.parse(str(first)) == first


@pytest.mark.parametrize(
    "text",
    [
        "",
        TOKEN,
        "$scrypt$ln=31,r=8,p=1$c2FsdHNhbHQ$" + "A" * 43,
        "$scrypt$ln=11,r=8,p=1$c2FsdHNhbHQ$" + "A" * 42,
        "$scrypt$ln=11,r=8,p=2$c2FsdHNhbHQ$" + "A" * 43,
        # Salted: without an id of its own, each test process would name it differently.
        pytest.param(str(hash_token(TOKEN)) + "\n", id="newline"),
    ],
)
def test_what_is_no_hash_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="not the hash of a token") as refused:
        User(name="anna", token_hash=text)
    assert not text or text not in str(refused.value)


def test_a_sign_in_takes_one_computation_for_any_number_of_users(computed: list[bytes]) -> None:
    like = hash_token("the-first-one-s-token")
    hashes = {
        f"u{n}": str(TokenHash(like.cost, like.salt, bytes(31) + bytes([n]))) for n in range(99)
    }
    computed.clear()
    tokens = Tokens({}, hashes | {"anna": str(hash_token(TOKEN, like))})
    computed.clear()
    assert tokens.find(TOKEN) == "anna"
    assert len(computed) == 1


def test_what_is_known_costs_nothing(computed: list[bytes]) -> None:
    token = "never-seen-in-another-test"
    hashes = {"anna": str(hash_token(token))}
    tokens = Tokens({}, hashes)
    for each in (token, "of-nobody-at-all"):
        found = tokens.find(each)
        computed.clear()
        assert tokens.find(each) == found
        assert not computed
    # A reload makes another one: clients that all reconnect cost nothing either.
    assert Tokens({}, hashes).find(token) == "anna"
    assert not computed


def test_what_is_known_ends_with_its_hash() -> None:
    tokens = Tokens({}, {"anna": str(hash_token(TOKEN))})
    assert tokens.find(TOKEN) == "anna"
    assert Tokens({}, {"anna": str(hash_token("another-secret-of-anna"))}).find(TOKEN) is None
    assert Tokens({}, {}).find(TOKEN) is None


def test_a_changed_hash_is_a_lost_credential() -> None:
    before = Access((User(name="anna", token_hash=str(hash_token(TOKEN))),))
    after = Access((User(name="anna", token_hash=str(hash_token(TOKEN))),))
    assert after.has_lost_credentials("anna", before)


def test_too_many_salts_are_a_mistake() -> None:
    def users(count: int) -> str:
        return "".join(
            f'[[users]]\nname = "u{n}"\ntoken_hash = "{hash_token(f"token-of-user-{n:06}")}"\n'
            for n in range(count)
        )

    assert check(users(4))[1] == []
    (mistake,) = check(users(5))[1]
    assert "too many different salts" in mistake.what


def test_tokens_in_files_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("BERTS", "a-secret-of-bert")
    text = f"""
[[users]]
name = "anna"
token_file = "{file}"
[[users]]
name = "bert"
token_env = "BERTS"
"""
    config, mistakes = check(text)
    assert config is not None, mistakes
    access = Access(config.users)
    assert access.by_token(TOKEN) == "anna"
    assert access.by_token("a-secret-of-bert") == "bert"
    file.write_text("short")
    monkeypatch.delenv("BERTS")
    wrong = [str(each) for each in check(text)[1]]
    assert "line 4: users[1].token_file: the token of anna is too short" in wrong[0]
    assert "line 7: users[2].token_env: there is no environment variable BERTS" in wrong[1]


@pytest.mark.slow
def test_the_command_prints_what_the_configuration_takes(tmp_path: Path) -> None:
    made = answer("user", "hash", "--generate")
    file = tmp_path / "crosswire.toml"
    file.write_text(f'[[users]]\nname = "anna"\ntoken_hash = "{made["token_hash"]}"\n')
    config = check(file.read_text())[0]
    assert config is not None and Access(config.users).by_token(made["token"]) == "anna"
    second = crosswire("user", "hash", "--config", str(file), given=b"a-secret-of-bert\n")
    found = TokenHash.parse(second.stdout.decode().strip())
    assert found.salt == TokenHash.parse(made["token_hash"]).salt
    assert str(found) == str(hash_token("a-secret-of-bert", found))
    short = crosswire("user", "hash", given=b"short\n")
    assert (short.returncode, short.stdout) == (1, b"")
