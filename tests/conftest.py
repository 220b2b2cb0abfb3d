"""What all tests share: the platform, and a place on disk.

The trap: JAX reads its environment when it is imported, so the platform is set at import time.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jdynoff.runtime.manager import manager_for


@pytest.fixture(scope="session")
def spill_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for spill files; empty before and after, since those have no names."""
    return tmp_path_factory.mktemp("spill")


@pytest.fixture(scope="session", autouse=True)
def out_of_the_users_directories(spill_directory: Path) -> Iterator[None]:
    """For the whole session, since fixtures of modules plan steps as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDYNOFF_SPILL_DIR", str(spill_directory))
        patch.setenv("JDYNOFF_PLAN_CACHE", "off")
        patch.setenv("JDYNOFF_MACHINE_FILE", str(spill_directory.parent / "no-machine.json"))
        yield


@pytest.fixture(autouse=True)
def no_named_spill_files(spill_directory: Path) -> Iterator[None]:
    """Looks for them after each test."""
    yield
    assert not list(spill_directory.iterdir()), "a spill file has a name"


@pytest.fixture
def manager() -> Iterator[Any]:
    """The manager of steps with `verify=True`; faults are taken back."""
    found = manager_for(None, verify=True)
    yield found
    found.inject_fault("none")
