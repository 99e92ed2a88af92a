"""The Store contract, over every kind of object store that can be had here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvstow.backends.base import Store
from kvstow.testing.store_suite import StoreSuite
from tests.rigs.object_server import ObjectServer
from tests.store.objects_rig import BUCKET, Moto, as_user, need_obstore, open_store

need_obstore()


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    moto = Moto(tmp_path_factory.mktemp("moto"))
    yield moto
    moto.kill()


@pytest.fixture(scope="module")
def fake() -> Iterator[ObjectServer]:
    server = ObjectServer().start()
    yield server
    server.stop()


def fresh() -> str:
    """Returns a new prefix, which keeps stores on one server apart."""
    return f"t{os.urandom(6).hex()}"


class TestMoto(StoreSuite):
    """S3 as moto serves it, slowly: few rounds. Large values are read in parts."""

    rounds = 4
    large_bytes: ClassVar[int] = 3 << 20

    @pytest.fixture(autouse=True)
    def _moto(self, moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
        as_user(monkeypatch)
        self.moto = moto

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(f"s3://{BUCKET}/{fresh()}", endpoint=self.moto.url, timeout_s=10.0)


class TestS3(StoreSuite):
    """A fake server, which is faster, so that calls really race."""

    @pytest.fixture(autouse=True)
    def _server(self, fake: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        as_user(monkeypatch)
        self.server = fake

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(f"s3://{BUCKET}/a/{fresh()}", endpoint=self.server.url, timeout_s=10.0)


class TestGcs(StoreSuite):
    """A fake server: there is no Google Cloud here."""

    rounds = 5

    @pytest.fixture(autouse=True)
    def _server(self, fake: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
        self.server = fake

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(f"gs://{BUCKET}/{fresh()}", endpoint=self.server.url, timeout_s=10.0)


class TestAzure(StoreSuite):
    """A fake server: there is no Azure here."""

    rounds = 5

    @pytest.fixture(autouse=True)
    def _server(self, fake: ObjectServer) -> None:
        self.server = fake

    def make_store(self, tmp_path: Path) -> Store:
        url = f"az://{BUCKET}/{fresh()}"
        return open_store(
            url, endpoint=self.server.url, account="kvstow", anonymous=True, timeout_s=10.0
        )


class TestDirectory(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/chunks", timeout_s=10.0)
