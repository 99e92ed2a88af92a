"""The disk store's parts that need no disk: the ledger's page, the index, names."""

from __future__ import annotations

import pytest

from kvstow.backends.disk import names
from kvstow.backends.disk.index import TOUCH_S, ChunkFile, ChunkIndex
from kvstow.backends.disk.ledger import MAX_PROCESSES, PAGE_BYTES, LedgerPage
from kvstow.pool.policy.lru import LRU
from kvstow.pool.policy.s3fifo import S3FIFO

NAMESPACE = b"n" * 32
TOKENS = [bytes([i]) * 16 for i in range(4)]


def digest(i: int) -> bytes:
    return i.to_bytes(32, "big")


def victims(index: ChunkIndex) -> list[int]:
    order = []
    while (victim := index.victim()) is not None:
        assert victim[0] == NAMESPACE
        order.append(int.from_bytes(victim[1], "big"))
    return order


@pytest.mark.parametrize("published", [None, 0, 123_456_789, 1 << 62])
@pytest.mark.parametrize("processes", [0, 1, 4, MAX_PROCESSES])
def test_a_page_is_read_as_it_was_written(published: int | None, processes: int) -> None:
    book = LedgerPage(
        b"i" * 16,
        published,
        7,
        8,
        {i.to_bytes(16, "big"): i << 20 for i in range(processes)},
        65535,
    )
    page = book.pack()
    assert len(page) == PAGE_BYTES
    assert LedgerPage.unpack(page) == book


def test_a_page_that_is_not_whole_is_none() -> None:
    page = LedgerPage(b"i" * 16, 5, 0, 0, dict.fromkeys(TOKENS, 9)).pack()
    for at in (0, 7, 8, 12, 20, 40, 70, 4095):
        assert LedgerPage.unpack(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None
    assert LedgerPage.unpack(page[:-1]) is None
    assert LedgerPage.unpack(b"") is None


def test_used_is_published_and_reserved_and_unknown_stays_unknown() -> None:
    book = LedgerPage(b"i" * 16, 100, reserved={TOKENS[0]: 30, TOKENS[1]: 5})
    assert book.used_bytes == 135
    book.add(10)
    book.remove(60)
    assert (book.published_bytes, book.added_bytes, book.removed_bytes) == (50, 10, 60)
    book.remove(1000)
    assert book.published_bytes == 0
    unknown = LedgerPage(b"i" * 16)
    unknown.add(10)
    unknown.remove(4)
    assert unknown.used_bytes is None
    assert (unknown.added_bytes, unknown.removed_bytes) == (10, 4)


def test_a_first_scan_brings_all_in_order_of_last_use() -> None:
    index = ChunkIndex(LRU())
    index.add(NAMESPACE, [ChunkFile(digest(8), 1, 800.0)])  # found by a request, before the scan
    index.begin_scan()
    index.add(NAMESPACE, [ChunkFile(digest(i), 1, i * 100.0) for i in (3, 1, 8, 2)])
    index.add(NAMESPACE, [ChunkFile(digest(9), 1, 900.0)])  # written meanwhile
    index.add(NAMESPACE, [ChunkFile(digest(5), 1, 500.0)])
    index.end_scan(complete=True)
    assert victims(index) == [1, 2, 3, 5, 8, 9]
    assert len(index) == 0


def test_a_later_scan_keeps_the_order_of_use_and_forgets_what_is_gone() -> None:
    index = ChunkIndex(LRU())
    index.begin_scan()
    index.add(NAMESPACE, [ChunkFile(digest(i), 1, i * 100.0) for i in range(5)])
    index.end_scan(complete=True)
    index.touch(digest(0), 1000.0)
    index.begin_scan()
    index.add(NAMESPACE, [ChunkFile(digest(i), 1, 0.0) for i in (0, 1, 3, 4)])
    index.end_scan(complete=True)
    assert not index.has(digest(2))
    assert victims(index) == [1, 3, 4, 0]


def test_recency_is_renewed_on_disk_at_most_once_a_minute() -> None:
    index = ChunkIndex(LRU())
    index.add(NAMESPACE, [ChunkFile(digest(1), 1, 1000.0)])
    assert [
        index.touch(digest(1), 1000.0 + dt) for dt in (1, TOUCH_S, TOUCH_S + 1, 2 * TOUCH_S)
    ] == [
        False,
        True,
        False,
        True,
    ]
    assert not index.touch(digest(2), 1e9)


def test_what_is_dropped_is_no_victim() -> None:
    for order in (LRU(), S3FIFO()):
        index = ChunkIndex(order)
        index.add(NAMESPACE, [ChunkFile(digest(i), 1, 0.0) for i in range(3)])
        index.drop(digest(1))
        index.drop(digest(7))
        assert sorted(victims(index)) == [0, 2]


def test_paths_are_made_of_digests() -> None:
    path = names.chunk_path(b"\xab" * 32, b"\xcd" * 32)
    assert path == f"{'ab' * 32}/c/d/{'cd' * 32}.kv"
    assert names.digest_of(path.rsplit("/", 1)[1]) == b"\xcd" * 32


def test_a_file_that_is_being_removed_is_not_added_again() -> None:
    index = ChunkIndex(LRU())
    index.add(NAMESPACE, [ChunkFile(digest(1), 1, 0.0)])
    with index.look() as look:
        assert index.victim() == (NAMESPACE, digest(1), 1)
        index.add(NAMESPACE, [ChunkFile(digest(1), 1, 0.0)], look)
        assert not index.has(digest(1)), "it is about to be unlinked"
        index.end_removal(digest(1))
        index.add(NAMESPACE, [ChunkFile(digest(1), 1, 0.0)], look)
        assert not index.has(digest(1)), "it was seen before it was unlinked"
    with index.look() as look:
        index.add(NAMESPACE, [ChunkFile(digest(1), 1, 0.0)], look)
    assert index.has(digest(1)), "it is there anew"


def test_what_is_known_is_counted_once_whoever_removes_it() -> None:
    index = ChunkIndex(LRU())
    index.add(NAMESPACE, [ChunkFile(digest(1), 7, 0.0)])
    assert index.begin_removal(digest(1)) == 7
    assert index.begin_removal(digest(1)) is None
    assert index.victim() is None
    index.end_removal(digest(1))
    index.add(NAMESPACE, [ChunkFile(digest(1), 8, 0.0)])
    assert index.victim() == (NAMESPACE, digest(1), 8)
