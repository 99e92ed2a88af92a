"""Tests on an emulated RBLN device. A process that has it keeps it, so they run in one of their own: ``-m rbln``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rbln import emulator

DRIVE_BYTES = 64 << 20
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.rbln)


@pytest.fixture(autouse=True)
def rbln() -> Iterator[None]:
    """The emulated device, with nothing counted, no delay and no limit. The first time it is built."""
    emulator.install()
    emulator.configure()
    emulator.reset_counters()
    yield
    emulator.refuse_fallback()
    emulator.configure()


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulator.Drive]:
    """``rebel.rds`` over a file."""
    emulator.install()
    made = emulator.install_rds(tmp_path_factory.mktemp("rds") / "drive", DRIVE_BYTES)
    yield made
    made.close()
