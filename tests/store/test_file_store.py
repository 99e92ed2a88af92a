import stat
from pathlib import Path

import pytest

from kvstow.backends.base import Store
from kvstow.errors import StoreUnavailable
from kvstow.testing.store_suite import StoreSuite, make_key, read_one, write_one
from tests.rigs.file_store import FileStore


class TestFileStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "store")


def test_values_outlive_the_store_and_are_private(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    write_one(store, make_key(0), b"kept")
    store.close()
    assert read_one(FileStore(tmp_path / "store"), make_key(0), 8)[1] == b"kept"
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert stat.S_IMODE(store.path(make_key(0)).stat().st_mode) == 0o600


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.path(make_key(0)).parent.joinpath("moved").mkdir()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable):
        write_one(store, make_key(0), b"lost")
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["moved"]


def test_a_rejected_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    write_one(store, make_key(0), b"first")
    write_one(store, make_key(0), b"second")
    assert list((tmp_path / "store").iterdir()) == [store.path(make_key(0))]
