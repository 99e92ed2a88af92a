"""The Store contract as tests. A store's own tests subclass it and create the store::

class TestMyStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return MyStore(tmp_path)
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome, Store
from kvstow.key import ChunkKey, Namespace

NAMESPACE = Namespace.from_fields({"made by": "StoreSuite"})
PAGE = 4096


def make_key(i: int, group: int = 0, namespace: Namespace = NAMESPACE) -> ChunkKey:
    return ChunkKey.build(namespace, group, i.to_bytes(32, "little"))


def value_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def read_one(store: Store, key: ChunkKey, room: int) -> tuple[Outcome, bytes]:
    """Reads one value into a fresh buffer of ``room`` bytes.

    Returns the outcome and the bytes read.
    """
    buffer = bytearray(room)
    [outcome] = store.read([(key, memoryview(buffer))])
    return outcome, bytes(buffer[: outcome.length]) if isinstance(outcome, Done) else b""


def write_one(store: Store, key: ChunkKey, *parts: bytes) -> Outcome:
    [outcome] = store.write([(key, [memoryview(part) for part in parts])])
    return outcome


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(0..count - 1)`` on a thread each, at once. Raises the first exception of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            start.wait()
            work(i)
        except BaseException as error:  # noqa: BLE001 (an assertion of any thread fails the test)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]  # noqa: TID251 (it tests thread safety)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class StoreSuite:
    """Each test gets a fresh, empty store, which must hold ``large_bytes`` and a few MiB more."""

    large_bytes: ClassVar[int] = 8 << 20
    rounds: ClassVar[int] = 40  # of each race

    def make_store(self, tmp_path: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = self.make_store(tmp_path)
        yield store
        store.close()

    def test_outcomes_come_in_order(self, store: Store) -> None:
        keys = [make_key(i) for i in range(6)]
        for i in (1, 3, 4):
            assert write_one(store, keys[i], value_of(i, PAGE + i)) == Done(PAGE + i)
        assert store.contains(keys) == [False, True, False, True, True, False]
        order = [4, 0, 3, 1, 5]
        buffers = [bytearray(PAGE + 8) for _ in order]
        outcomes = store.read(
            [(keys[i], memoryview(b)) for i, b in zip(order, buffers, strict=True)]
        )
        assert outcomes == [Done(PAGE + 4), MISSING, Done(PAGE + 3), Done(PAGE + 1), MISSING]
        for i, buffer, outcome in zip(order, buffers, outcomes, strict=True):
            if isinstance(outcome, Done):
                assert buffer[: outcome.length] == value_of(i, PAGE + i)

    def test_a_batch_is_written_item_by_item(self, store: Store) -> None:
        write_one(store, make_key(1), b"first")
        items = [(make_key(i), [memoryview(value_of(i, PAGE))]) for i in range(3)]
        assert store.write(items) == [Done(PAGE), REJECTED, Done(PAGE)]
        got = [read_one(store, make_key(i), PAGE)[1] for i in range(3)]
        assert got == [value_of(0, PAGE), b"first", value_of(2, PAGE)]

    def test_parts_are_concatenated(self, store: Store) -> None:
        parts = [value_of(i, n) for i, n in enumerate((PAGE, 1, 0, 3 * PAGE, 777))]
        assert write_one(store, make_key(0), *parts) == Done(4 * PAGE + 778)
        assert read_one(store, make_key(0), 4 * PAGE + 778) == (
            Done(4 * PAGE + 778),
            b"".join(parts),
        )

    def test_parts_may_be_read_only_and_inside_a_larger_buffer(self, store: Store) -> None:
        whole = memoryview(value_of(1, 4 * PAGE)).toreadonly()
        store.write([(make_key(0), [whole[PAGE : 2 * PAGE], whole[:PAGE]])])
        assert read_one(store, make_key(0), 2 * PAGE)[1] == bytes(whole[PAGE : 2 * PAGE]) + bytes(
            whole[:PAGE]
        )

    def test_a_longer_buffer_keeps_its_tail(self, store: Store) -> None:
        write_one(store, make_key(0), value_of(0, 100))
        buffer = bytearray(b"\xaa" * 300)
        assert store.read([(make_key(0), memoryview(buffer)[100:250])]) == [Done(100)]
        assert buffer[100:200] == value_of(0, 100)
        assert buffer[:100] == b"\xaa" * 100
        assert buffer[250:] == b"\xaa" * 50

    def test_a_value_longer_than_its_buffer_is_rejected(self, store: Store) -> None:
        write_one(store, make_key(0), value_of(0, PAGE))
        write_one(store, make_key(1), value_of(1, 10))
        buffer = bytearray(3 * PAGE)
        view = memoryview(buffer)
        assert store.read([(make_key(0), view[: PAGE - 1]), (make_key(1), view[PAGE:])]) == [
            REJECTED,
            Done(10),
        ]
        assert not any(buffer[PAGE - 1 : PAGE])
        assert read_one(store, make_key(0), PAGE) == (Done(PAGE), value_of(0, PAGE))

    def test_the_first_value_wins(self, store: Store) -> None:
        assert write_one(store, make_key(0), b"first") == Done(5)
        assert write_one(store, make_key(0), b"second, longer") == REJECTED
        assert write_one(store, make_key(0), b"first") == REJECTED
        assert read_one(store, make_key(0), 64) == (Done(5), b"first")

    def test_the_same_key_twice_in_a_batch(self, store: Store) -> None:
        key, other = make_key(0), make_key(1)
        items = [
            (key, [memoryview(b"one")]),
            (other, [memoryview(b"x")]),
            (key, [memoryview(b"two")]),
        ]
        assert store.write(items) == [Done(3), Done(1), REJECTED]
        a, b = bytearray(8), bytearray(8)
        assert store.read([(key, memoryview(a)), (key, memoryview(b))]) == [Done(3), Done(3)]
        assert a[:3] == b[:3] == b"one"
        assert store.contains([key, key]) == [True, True]
        store.delete([key, key])
        assert store.contains([key, other]) == [False, True]

    def test_empty_batches(self, store: Store) -> None:
        assert store.contains([]) == []
        assert store.read([]) == []
        assert store.write([]) == []
        store.delete([])

    def test_delete_is_idempotent(self, store: Store) -> None:
        write_one(store, make_key(0), b"a")
        write_one(store, make_key(1), b"b")
        store.delete([make_key(2), make_key(0)])
        store.delete([make_key(0)])
        assert store.contains([make_key(0), make_key(1)]) == [False, True]
        assert read_one(store, make_key(0), 8)[0] is MISSING

    def test_a_deleted_key_can_be_written_again(self, store: Store) -> None:
        write_one(store, make_key(0), b"old")
        store.delete([make_key(0)])
        assert write_one(store, make_key(0), b"brand new") == Done(9)
        assert read_one(store, make_key(0), 16)[1] == b"brand new"

    def test_a_large_value(self, store: Store) -> None:
        value = value_of(5, self.large_bytes)
        half = self.large_bytes // 2 + 1
        assert write_one(store, make_key(0), value[:half], value[half:]) == Done(self.large_bytes)
        outcome, got = read_one(store, make_key(0), self.large_bytes)
        assert outcome == Done(self.large_bytes)
        assert got == value

    def test_keys_of_every_length_and_any_bytes(self, store: Store) -> None:
        hashes = [bytes(n) for n in range(1, 65)] + [b"\xff" * n for n in range(1, 65)]
        hashes += [
            b"../../x",
            b"/",
            b".",
            b"..",
            b"a\nb\r\n",
            b"{}*?[",
            b"\\",
            b"%2f",
            "ключ".encode(),
        ]
        keys = [ChunkKey.build(NAMESPACE, 0, h) for h in hashes]
        for i, key in enumerate(keys):
            assert write_one(store, key, i.to_bytes(4, "little")) == Done(4)
        assert all(store.contains(keys))
        assert [int.from_bytes(read_one(store, key, 4)[1], "little") for key in keys] == list(
            range(len(keys))
        )

    def test_namespaces_and_groups_are_apart(self, store: Store) -> None:
        other = NAMESPACE.derive("x", "y")
        keys = [
            make_key(7),
            make_key(7, group=1),
            make_key(7, group=256),
            make_key(7, namespace=other),
        ]
        write_one(store, keys[0], b"0")
        assert store.contains(keys) == [True, False, False, False]
        for i, key in enumerate(keys[1:], 1):
            assert write_one(store, key, b"%d" % i) == Done(1)
        store.delete([keys[0]])
        assert store.contains(keys) == [False, True, True, True]
        assert [read_one(store, key, 1)[1] for key in keys[1:]] == [b"1", b"2", b"3"]

    def test_no_buffer_is_kept(self, store: Store) -> None:
        source = bytearray(value_of(1, 2 * PAGE))
        store.write([(make_key(0), [memoryview(source)[:PAGE], memoryview(source)[PAGE:]])])
        source[:] = bytes(2 * PAGE)
        target = bytearray(2 * PAGE)
        store.read([(make_key(0), memoryview(target))])
        assert target == value_of(1, 2 * PAGE)
        target[:] = b"\x01" * 2 * PAGE
        source.clear()  # raises BufferError while a view of it is alive
        target.clear()
        assert read_one(store, make_key(0), 2 * PAGE)[1] == value_of(1, 2 * PAGE)

    def test_close_is_idempotent(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        write_one(store, make_key(0), b"x")
        store.close()
        store.close()

    def test_one_of_many_writers_wins(self, store: Store) -> None:
        for round_ in range(self.rounds):
            key = make_key(round_)
            won: list[int] = []

            def write(i: int, key: ChunkKey = key, won: list[int] = won) -> None:
                if isinstance(write_one(store, key, bytes([i]) * PAGE), Done):
                    won.append(i)

            in_threads(4, write)
            assert len(won) == 1
            assert read_one(store, key, PAGE) == (Done(PAGE), bytes([won[0]]) * PAGE)

    def test_no_reader_sees_part_of_a_value(self, store: Store) -> None:
        """One thread writes and deletes values of different lengths and bytes while others read."""
        key, sizes = make_key(0), [PAGE, 16 * PAGE, 64 * PAGE]
        stop = threading.Event()

        def work(i: int) -> None:
            if i == 0:
                try:
                    self._write_and_delete(store, key, sizes)
                finally:
                    stop.set()
                return
            buffer: Buffer = memoryview(bytearray(max(sizes)))
            while not stop.is_set():
                [outcome] = store.read([(key, buffer)])
                if isinstance(outcome, Done):
                    assert outcome.length in sizes
                    assert (
                        bytes(buffer[: outcome.length])
                        == bytes([sizes.index(outcome.length) + 1]) * outcome.length
                    )

        in_threads(4, work)

    def _write_and_delete(self, store: Store, key: ChunkKey, sizes: list[int]) -> None:
        for round_ in range(self.rounds):
            which = round_ % len(sizes)
            value = bytes([which + 1]) * sizes[which]
            assert write_one(store, key, value[:PAGE], value[PAGE:]) == Done(sizes[which])
            store.delete([key])

    def test_threads_do_not_disturb_each_other(self, store: Store) -> None:
        def work(i: int) -> None:
            rng = random.Random(i)
            held: dict[ChunkKey, bytes] = {}
            for n in range(self.rounds):
                key = make_key(i * 1000 + rng.randrange(8))
                if key in held and rng.random() < 0.4:
                    store.delete([key])
                    del held[key]
                value = value_of(i * 1000 + n, rng.choice((17, PAGE, 5 * PAGE)))
                assert write_one(store, key, value) == (
                    REJECTED if key in held else Done(len(value))
                )
                held.setdefault(key, value)
                assert store.contains([key]) == [True]
                assert read_one(store, key, 5 * PAGE)[1] == held[key]

        in_threads(6, work)
