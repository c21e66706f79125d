"""What a configuration exposes, and when `serve` refuses it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from crosswire.access import User
from crosswire.config import Config, EmqpSettings, TlsFiles
from crosswire.errors import ConfigError
from crosswire.listeners import LISTENERS
from crosswire.server.exposure import find_exposures, refuse_exposures
from tests.gateways.conftest import StartServer

TOKEN = User(name="anna", token="a-secret-of-anna")
CERTIFICATE = User(name="anna", certificate="anna")
TLS = TlsFiles(certificate="c.pem", key="k.pem")


def config(*remote: str, user: User = TOKEN, insecure: bool = False) -> Config:
    """Only these listeners are open, on all addresses."""
    listen = {name: "0.0.0.0:0" if name in remote else "off" for name in LISTENERS}
    return Config(listen=listen, users=(user,), tls=TLS, insecure=insecure)


@pytest.mark.parametrize("listener", ["emp", "epoxy", "http", "micromsg2"])
def test_tokens_need_tls_on_other_addresses(listener: str) -> None:
    with pytest.raises(ConfigError, match=f"{listener}: on 0.0.0.0:0 tokens would be sent"):
        refuse_exposures(config(listener))
    assert refuse_exposures(config(listener, user=CERTIFICATE)) == []
    (warning,) = refuse_exposures(config(listener, insecure=True))
    assert warning.path == ("listen", listener)


@pytest.mark.parametrize(
    "listener", ["emp-tls", "epoxy-tls", "micromsg2-tls", "relink", "relink-tls", "emqp-clients"]
)
def test_listeners_that_carry_no_readable_token_pass(listener: str) -> None:
    assert refuse_exposures(config(listener)) == []


def test_on_loopback_tokens_without_tls_are_a_warning() -> None:
    listen = {name: "127.0.0.1:0" if name in ("emp", "http") else "off" for name in LISTENERS}
    (warning,) = refuse_exposures(Config(listen=listen, users=(TOKEN,)))
    assert not warning.is_refused
    assert warning.what.endswith("loopback only: emp, http")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_with_tokens_that_others_can_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{file}: it has tokens or keys"):
        refuse_exposures(config("emp-tls"), file)
    (warning,) = refuse_exposures(config("emp-tls", insecure=True), file)
    assert warning.path == ()
    (warning,) = refuse_exposures(config(), file)
    assert "chmod 600" in warning.hint
    assert refuse_exposures(config("emp-tls", user=CERTIFICATE), file) == []
    file.chmod(0o600)
    assert refuse_exposures(config("emp-tls"), file) == []


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o622])
def test_a_file_that_others_can_change(tmp_path: Path, mode: int) -> None:
    """Whether it has a secret or not: they could make themselves administrators."""
    file = tmp_path / "crosswire.toml"
    file.write_text("")
    file.chmod(mode)
    with pytest.raises(ConfigError, match="may change it"):
        refuse_exposures(config("emp-tls", user=CERTIFICATE), file)
    (warning,) = refuse_exposures(config(user=CERTIFICATE), file)
    assert (warning.path, warning.is_refused) == ((), False)


def test_a_key_of_tls_that_others_can_read(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("")
    key.chmod(0o640)
    tls = TlsFiles(certificate="c.pem", key=str(key))
    exposed = msgspec.structs.replace(config("emp-tls"), tls=tls)
    with pytest.raises(ConfigError, match="may read"):
        refuse_exposures(exposed)
    key.chmod(0o600)
    assert refuse_exposures(exposed) == []


def test_the_hubs_own_key_is_a_secret_too(tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("")
    file.chmod(0o644)
    secret = Config(emqp=EmqpSettings(curve_secret_key="x" * 40))
    assert [each.path for each in find_exposures(secret, file)] == [()]


async def test_a_running_hub_does_not_take_on_an_exposed_token(start_server: StartServer) -> None:
    server = await start_server(users=(CERTIFICATE,), listen={"emp": "0.0.0.0:0"})
    with pytest.raises(ConfigError, match="tokens would be sent without encryption"):
        server.reload(msgspec.structs.replace(server.config, users=(TOKEN,)))
    assert server.context.access.by_token("a-secret-of-anna") is None
