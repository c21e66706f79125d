"""Memory and files that the process may use."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from crosswire.resources import available_memory_bytes, memory_limit_bytes, raise_file_limit

MIB = 1024 * 1024


def test_the_least_limit_of_nested_groups_holds(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/hub.service\n")
    group = tmp_path / "system.slice" / "hub.service"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{200 * MIB}\n")
    assert available_memory_bytes(tmp_path, own) == 200 * MIB
    (group / "memory.max").write_text(f"{100 * MIB}\n")
    assert available_memory_bytes(tmp_path, own) == 100 * MIB


def test_version_1_and_a_container_where_only_the_top_is_mounted(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("12:cpu,cpuacct:/docker/1234\n4:memory:/docker/1234\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{50 * MIB}\n")
    assert available_memory_bytes(tmp_path, own) == 50 * MIB


def test_without_groups_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path, tmp_path / "none") > 64 * MIB


def test_the_default_limit_is_half_of_it() -> None:
    assert memory_limit_bytes(0) == available_memory_bytes() // 2
    assert memory_limit_bytes(5) == 5


def test_the_soft_limit_of_files_is_raised_as_far_as_the_hard_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_file_limit(300) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        assert raise_file_limit(100) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (64, 128))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, _limits: None)
    assert raise_file_limit(1000) == 128
