"""Bytes over a socket: whole, bounded in time, seen as they pass. Against a peer that says what the test lets it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from redis.exceptions import ResponseError

from kvstow.backends.redis.wire import LARGE_BYTES, PIECE_BYTES, Passing, Wire
from kvstow.layout import HEADER_BYTES
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.testing.store_suite import value_of
from tests.rigs.redis_server import HOST

SOON_S = 0.2
SIZES = (0, 1, 600, LARGE_BYTES - 1, LARGE_BYTES + 513, PIECE_BYTES, 3 * PIECE_BYTES + 7)


class Peer:
    def __init__(self, family: int, where: str) -> None:
        listener = socket.socket(family)
        listener.bind((HOST, 0) if family == socket.AF_INET else where)
        listener.listen(1)
        ours = socket.socket(family)
        ours.connect(listener.getsockname())
        ours.settimeout(SOON_S)
        self.theirs, _ = listener.accept()
        listener.close()
        self.ours = ours
        self.wire = Wire(ours, ResponseError, SystemClock(), SOON_S)
        self.executor = ThreadExecutor("peer")

    def does(self, work: Callable[[], object]) -> None:
        self.executor.submit(work, lambda _value, _error: None)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        self.executor.close(5.0)


@pytest.fixture(params=[socket.AF_INET, socket.AF_UNIX], ids=["tcp", "unix"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(request.param, str(tmp_path / "s"))
    yield peer
    peer.close()


@pytest.mark.parametrize("size", SIZES)
def test_values_come_whole_one_behind_the_other_and_are_summed(peer: Peer, size: int) -> None:
    values = [value_of(i, size) for i in range(3)]
    peer.does(
        lambda: peer.theirs.sendall(b"".join(b"$%d\r\n%s\r\n" % (size, value) for value in values))
    )
    for value in values:
        peer.wire.begin()
        assert peer.wire.bulk() == size
        buffer, passing = bytearray(size + 9), Passing()
        peer.wire.take(memoryview(buffer)[:size], passing)
        peer.wire.end()
        assert buffer == value + bytes(9)
        assert passing.digest() == xxhash.xxh3_128_digest(value[HEADER_BYTES:])
    assert peer.wire.idle


@pytest.mark.parametrize("size", SIZES)
def test_values_are_sent_whole(peer: Peer, size: int) -> None:
    parts = [value_of(1, size), b"", value_of(2, 17), value_of(3, size)]
    got = bytearray()

    def take() -> None:
        while len(got) < 2 * size + 17:
            got.extend(peer.theirs.recv(1 << 20))

    peer.does(take)
    peer.wire.begin()
    peer.wire.send(parts)
    while peer.executor.outstanding:
        peer.executor.wait(1.0)
        peer.executor.poll()
    assert bytes(got) == b"".join(parts)


@pytest.mark.parametrize("came", [0, 100, PIECE_BYTES + 5])
def test_h4_a_peer_that_stops_amid_a_value_is_given_up(peer: Peer, came: int) -> None:
    size = 4 * PIECE_BYTES
    peer.does(lambda: peer.theirs.sendall(b"$%d\r\n" % size + bytes(came)))
    peer.wire.begin()
    assert peer.wire.bulk() == size
    with pytest.raises(TimeoutError):
        peer.wire.take(memoryview(bytearray(size)))


def test_h4_a_peer_that_takes_nothing_is_given_up(peer: Peer) -> None:
    peer.wire.begin()
    with pytest.raises(TimeoutError):
        peer.wire.send([bytes(64 << 20)])


@pytest.mark.parametrize("came", [0, 100, PIECE_BYTES + 5])
def test_a_peer_that_hangs_up_amid_a_value_is_a_lost_connection(peer: Peer, came: int) -> None:
    size = 4 * PIECE_BYTES

    def say_and_leave() -> None:
        peer.theirs.sendall(b"$%d\r\n" % size + bytes(came))
        peer.theirs.close()

    peer.does(say_and_leave)
    peer.wire.begin()
    assert peer.wire.bulk() == size
    with pytest.raises(ConnectionError):
        peer.wire.take(memoryview(bytearray(size)))
