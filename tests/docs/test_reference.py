"""Pages of the reference have what the code has."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import msgspec
import pytest

from crosswire.gateways.emp import messages
from crosswire.gateways.emp.gateway import _OPERATIONS
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"
OPERATIONS = (REFERENCE / "emp-operations.md").read_text()
STRUCTS = {
    "$authenticate": messages.AuthenticateData,
    "$publish": messages.PublishData,
    "$subscribe": messages.SubscribeData,
    "$deliver": messages._DeliverData,
    "$unsubscribe": messages.UnsubscribeData,
    "$extend": messages.ExtendData,
    "$serve": messages.ServeData,
    "$unschedule": messages.UnscheduleData,
    "$get_op": messages.GetOpData,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["command-line.md", "configuration.md"])
def test_a_page_is_what_the_script_makes(
    script: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", script.COLUMNS)
    page = (REFERENCE / name).read_text()
    made = re.search(r"with Python (\d+\.\d+)", page)
    if made is not None and made[1] != ".".join(map(str, sys.version_info[:2])):
        pytest.skip("another Python prints options in another way")
    assert page == "\n".join(script.PAGES[name]()), "run `make reference`"


def section(operation: str) -> str:
    found = re.search(rf"^## `{re.escape(operation)}`\n(.*?)(?=^## |\Z)", OPERATIONS, re.M | re.S)
    assert found is not None, operation
    return found[1]


def test_every_operation_of_emp_is_described() -> None:
    described = set(re.findall(r"^## `(\$\w+)`$", OPERATIONS, re.M))
    assert described == {*_OPERATIONS, "$publish", "$deliver"}


@pytest.mark.parametrize("operation", STRUCTS)
def test_every_field_of_an_operation_is_described(operation: str) -> None:
    fields = {field.encode_name for field in msgspec.structs.fields(STRUCTS[operation])}
    rows = re.findall(r"^\| (`[^|]+) \|", section(operation), re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == fields


def test_a_schedule_has_the_fields_of_a_message_and_its_own() -> None:
    fields = {field.encode_name for field in msgspec.structs.fields(messages.ScheduleData)}
    own = fields - {field.encode_name for field in msgspec.structs.fields(messages.PublishData)}
    assert set(re.findall(r"^\| `(\w+)` \|", section("$schedule"), re.M)) == own
