import struct

import pytest

from kvstow import frame as f
from kvstow.errors import FrameError
from kvstow.frame import (
    FrameHeader,
    PayloadChecksum,
    check,
    frame_spans,
    parse_header,
    seal,
    verify,
    write_header,
)
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import ALIGN, HEADER_BYTES, GroupLayout

GROUP = GroupLayout(block_tokens=16, blocks_per_chunk=2, shard_block_bytes=(3000, 2048))
NAMESPACE = Namespace.from_fields({"model": "m"})
KEY = ChunkKey.build(NAMESPACE, 1, b"h" * 32)
PARENT = b"p" * 32
SECRET = b"a secret of the operator's"
CREATED = 1_700_000_000.25


def sealed(
    integrity_key: bytes | None = None, *, key: ChunkKey = KEY, lossy: bool = False
) -> memoryview:
    """A frame in a slot that held something else before."""
    frame = memoryview(bytearray(b"\xee" * GROUP.frame_bytes))
    for span in GROUP.spans():
        frame[span.offset : span.offset + span.length] = bytes(i % 251 for i in range(span.length))
    seal(frame, key, GROUP, 32, PARENT, CREATED, lossy=lossy, integrity_key=integrity_key)
    return frame


def forge(frame: memoryview, offset: int, value: bytes) -> None:
    """Change a header and make its checksum right again, as whoever can write to the store could."""
    frame[offset : offset + len(value)] = value
    frame[4080:4096] = f.xxh3_128_digest(frame[:4080])


def test_what_is_sealed_checks_and_reads_back() -> None:
    frame = sealed(lossy=True)
    header = check(frame, len(frame), KEY, GROUP)
    assert header == FrameHeader(
        key=KEY,
        parent=PARENT,
        tokens=32,
        raw_length=6000 + 4096,
        spans=((4096, 6000, 0), (4096 + 8192, 4096, 1)),
        checksum=header.checksum,
        created=CREATED,
        lossy=True,
    )
    assert (header.payload_length, header.frame_length) == (10096, GROUP.frame_bytes)


def test_sealing_changes_no_payload_byte_and_zeroes_the_padding() -> None:
    frame = sealed()
    first, second = GROUP.spans()
    assert bytes(frame[first.offset : first.offset + 6000]) == bytes(i % 251 for i in range(6000))
    assert not any(frame[first.offset + 6000 : second.offset])


def test_the_format_is_pinned() -> None:
    """Frames outlive the process: what is here changes only with the magic."""
    frame = sealed()
    assert bytes(frame[:8]) == b"KVSTOW1\0"
    assert struct.unpack_from("<II", frame, 8) == (4096, 0)
    assert bytes(frame[16:48]) == NAMESPACE
    assert struct.unpack_from("<HH", frame, 48) == (1, 32)
    assert bytes(frame[52:116]) == b"h" * 32 + bytes(32)
    assert struct.unpack_from("<H", frame, 116) == (32,)
    assert bytes(frame[120:184]) == PARENT + bytes(32)
    assert struct.unpack_from("<IHH", frame, 184) == (32, 0, 0)
    assert struct.unpack_from("<QQQI", frame, 448) == (10096, 10096, 1_700_000_000_250_000, 2)
    assert struct.unpack_from("<QQIIQQI", frame, 480) == (4096, 6000, 0, 0, 12288, 4096, 1)
    assert bytes(frame[2016:2032]).hex() == "a58cc6463c207c16a4d70663d3a98ed8"
    assert not any(frame[2032:4080])
    assert bytes(frame[4080:4096]).hex() == "529ec11dc4208c406f973fd538d76c3c"


@pytest.mark.parametrize(
    "length", [0, 1, 4095, 4096, GROUP.frame_bytes - ALIGN, GROUP.frame_bytes - 1]
)
def test_a_truncated_frame_is_refused(length: int) -> None:
    with pytest.raises(FrameError):
        check(sealed(), length, KEY, GROUP)


def test_lengths_are_checked_before_a_byte_is_read() -> None:
    with pytest.raises(FrameError, match="frame of this group"):
        check(memoryview(b""), GROUP.frame_bytes, KEY, GROUP)
    longer = memoryview(bytearray(sealed()) + bytes(ALIGN))
    with pytest.raises(FrameError, match="frame of this group"):
        check(longer, len(longer), KEY, GROUP)


@pytest.mark.parametrize(
    "key",
    [
        ChunkKey.build(NAMESPACE, 1, b"i" + b"h" * 31),
        ChunkKey.build(NAMESPACE, 1, b"h" * 31),
        ChunkKey.build(NAMESPACE, 0, b"h" * 32),
        ChunkKey.build(Namespace.from_fields({"model": "n"}), 1, b"h" * 32),
    ],
)
def test_a_whole_frame_of_another_key_is_refused(key: ChunkKey) -> None:
    frame = sealed(key=key)
    with pytest.raises(FrameError, match="not of"):
        check(frame, len(frame), KEY, GROUP)


@pytest.mark.parametrize(
    "group",
    [
        GroupLayout(16, 2, (2048, 3000)),  # as long, with the spans the other way round
        GroupLayout(16, 2, (3001, 2048)),  # as long, one byte a block more
        GroupLayout(8, 2, (3000, 2048)),  # half the tokens
    ],
)
def test_b8_a_frame_of_another_layout_with_the_same_length_is_refused(group: GroupLayout) -> None:
    frame = sealed()
    assert group.frame_bytes == len(frame)
    with pytest.raises(FrameError, match="layout"):
        check(frame, len(frame), KEY, group)


def test_a9_a_slot_that_was_rewritten_during_a_read_is_a_miss() -> None:
    """The read began on one chunk and ended on another, at any page between the two."""
    theirs = sealed(key=ChunkKey.build(NAMESPACE, 1, b"x" * 32))
    for span in GROUP.spans():
        theirs[span.offset : span.offset + span.length] = b"\xff" * span.length
    seal(theirs, ChunkKey.build(NAMESPACE, 1, b"x" * 32), GROUP, 32, PARENT, CREATED)
    for cut in range(ALIGN, len(theirs), ALIGN):
        for torn in (
            bytes(sealed()[:cut]) + bytes(theirs[cut:]),
            bytes(theirs[:cut]) + bytes(sealed()[cut:]),
        ):
            with pytest.raises(FrameError):
                check(memoryview(torn), len(torn), KEY, GROUP)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"KVSTOW2\0"),  # magic
        (8, b"\x00\x20"),  # header length
        (12, b"\x04"),  # unknown flag
        (50, b"\x41\x00"),  # hash lengths above 64, or 0
        (50, b"\x00\x00"),
        (116, b"\x41\x00"),
        (184, b"\x00\x00\x00\x00"),  # no tokens
        (188, b"\x01\x00"),  # coded
        (190, b"\x01\x01"),  # codec parameters of 257 bytes
        (448, b"\xff" * 8),  # raw length out of bounds, or not the payload's
        (448, b"\x01"),
        (456, b"\xff" * 8),  # payload length
        (472, b"\x00\x00\x00\x00"),  # no spans, too many, fewer than there are
        (472, b"\x41\x00\x00\x00"),
        (472, b"\xff\xff\xff\xff"),
        (472, b"\x01\x00\x00\x00"),
        (480, b"\x00" * 8),  # a span over the header, unaligned, over the other, beyond the end
        (480, b"\x01\x10"),
        (504, b"\x00\x20"),
        (504, b"\xff" * 8),
        (488, b"\x00" * 8),  # a span of no bytes, of too many
        (488, b"\xff" * 8),
        (496, b"\x05"),  # another shard
    ],
)
def test_a_header_with_any_field_out_of_bounds_is_refused(offset: int, value: bytes) -> None:
    frame = sealed()
    forge(frame, offset, value)
    with pytest.raises(FrameError):
        check(frame, len(frame), KEY, GROUP)


@pytest.mark.parametrize(
    ("offset", "span"), [(480, 0), (504, 0), (504, 4096), (504, 8192), (504, 12289)]
)
def test_spans_that_overlap_or_are_not_aligned_are_refused_without_a_layout(
    offset: int, span: int
) -> None:
    frame = sealed()
    forge(frame, offset, span.to_bytes(8, "little"))
    with pytest.raises(FrameError, match="span at"):
        parse_header(frame[:HEADER_BYTES])


def test_a_header_page_of_another_length_is_refused() -> None:
    with pytest.raises(FrameError):
        parse_header(sealed()[: HEADER_BYTES - 1])


def test_a_keyed_frame_checks_with_its_key_only() -> None:
    frame = sealed(SECRET)
    assert check(frame, len(frame), KEY, GROUP, integrity_key=SECRET).mac is not None
    for other in (b"another", None):
        with pytest.raises(FrameError):
            check(frame, len(frame), KEY, GROUP, integrity_key=other)


def test_l5_with_a_key_an_unkeyed_frame_is_refused() -> None:
    frame = sealed()
    with pytest.raises(FrameError, match="not keyed"):
        check(frame, len(frame), KEY, GROUP, integrity_key=SECRET)


def test_l5_a_keyed_frame_can_be_neither_forged_nor_swapped() -> None:
    """Without the key: the payload with its checksum made right, the header, another frame's MAC, another's payload."""
    other_key = ChunkKey.build(NAMESPACE, 1, b"o" * 32)
    payload, header, swapped = sealed(SECRET), sealed(SECRET), sealed(SECRET, key=other_key)
    payload[5000] ^= 1
    checksum = PayloadChecksum()
    for span in GROUP.spans():
        checksum.update(payload[span.offset : span.offset + span.length])
    forge(payload, 2016, checksum.checksum)
    forge(header, 120, b"q")  # another parent
    forge(swapped, 52, b"h" * 32)  # the other frame under this one's key
    unkeyed = sealed(SECRET)
    forge(unkeyed, 12, b"\x00")
    for frame in (payload, header, swapped, unkeyed):
        with pytest.raises(FrameError):
            check(frame, len(frame), KEY, GROUP, integrity_key=SECRET)


def test_l5_a_keyed_frame_does_not_rest_on_a_checksum_that_can_be_collided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XXH3 is no cryptographic hash: two payloads with one checksum are easily made. Here all have the same."""

    class Same:
        def update(self, piece: object) -> None:
            pass

        def digest(self) -> bytes:
            return bytes(16)

    monkeypatch.setattr(f, "xxh3_128", Same)
    frame = sealed(SECRET)
    check(frame, len(frame), KEY, GROUP, integrity_key=SECRET)
    frame[5000] ^= 1
    with pytest.raises(FrameError, match="MAC"):
        check(frame, len(frame), KEY, GROUP, integrity_key=SECRET)


@pytest.mark.parametrize("integrity_key", [None, SECRET])
@pytest.mark.parametrize("piece_bytes", [1, 1000, 4096, 1 << 20])
def test_a_store_can_check_bytes_as_they_pass(
    integrity_key: bytes | None, piece_bytes: int
) -> None:
    frame = sealed(integrity_key)
    header = parse_header(frame[:HEADER_BYTES])
    payload = PayloadChecksum(integrity_key)
    for span in header.spans:
        end = span.offset + span.length
        for at in range(span.offset, end, piece_bytes):
            payload.update(frame[at : min(end, at + piece_bytes)])
    verify(frame[:HEADER_BYTES], header, payload, integrity_key=integrity_key)
    payload.update(b"\0")
    with pytest.raises(FrameError):
        verify(frame[:HEADER_BYTES], header, payload, integrity_key=integrity_key)


def test_a_codec_builds_a_header_of_its_own() -> None:
    coded = memoryview(bytearray(HEADER_BYTES + ALIGN))
    coded[HEADER_BYTES : HEADER_BYTES + 3] = b"abc"
    payload = PayloadChecksum()
    payload.update(b"abc")
    plain = parse_header(sealed()[:HEADER_BYTES])
    mine = plain._replace(
        spans=frame_spans((3,)), codec_id=7, codec_parameters=b"\x01\x02", lossy=True
    )
    write_header(coded, mine, payload, None)
    read = parse_header(coded[:HEADER_BYTES])
    assert read == mine._replace(checksum=payload.checksum)
    assert (read.raw_length, read.payload_length) == (10096, 3)
    verify(coded[:HEADER_BYTES], read, payload)
    with pytest.raises(FrameError, match="codec"):
        check(coded, len(coded), KEY, GroupLayout(32, 1, (3,)))


@pytest.mark.parametrize(
    "change", [{"parent": b"p" * 65}, {"codec_parameters": bytes(257)}, {"spans": ()}]
)
def test_a_header_that_does_not_fit_is_not_written(change: dict[str, object]) -> None:
    header = parse_header(sealed()[:HEADER_BYTES])._replace(**change)
    with pytest.raises(ValueError):
        write_header(memoryview(bytearray(HEADER_BYTES)), header, PayloadChecksum(), None)


def test_a_frame_holds_64_shards_and_no_more() -> None:
    for shards in (64, 65):
        group = GroupLayout(1, 1, (10,) * shards)
        frame = memoryview(bytearray(group.frame_bytes))
        if shards > f.MAX_SPANS:
            with pytest.raises(ValueError):
                seal(frame, KEY, group, 1, b"", CREATED)
        else:
            seal(frame, KEY, group, 1, b"", CREATED)
            assert len(check(frame, len(frame), KEY, group).spans) == shards
