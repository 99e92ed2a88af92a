"""No change to a frame's header or payload passes; what is sealed always does."""

from random import Random
from typing import NamedTuple

import pytest

from kvstow.errors import FrameError
from kvstow.frame import check, seal
from kvstow.key import ChunkKey, Namespace
from kvstow.layout import GroupLayout

SEEDS = range(100)


class Case(NamedTuple):
    frame: memoryview
    key: ChunkKey
    group: GroupLayout
    secret: bytes | None

    def check(self, frame: memoryview | None = None, length: int | None = None) -> None:
        frame = self.frame if frame is None else frame
        check(
            frame,
            len(frame) if length is None else length,
            self.key,
            self.group,
            integrity_key=self.secret,
        )

    def assert_refused(self, frame: memoryview | None = None, length: int | None = None) -> None:
        with pytest.raises(FrameError):
            self.check(frame, length)


def draw(rng: Random) -> Case:
    """A sealed frame of random everything, over what was in the slot before."""
    key = ChunkKey.build(
        Namespace(rng.randbytes(32)), rng.randrange(65536), rng.randbytes(rng.randint(1, 64))
    )
    shards = tuple(rng.choice((1, rng.randint(1, 6000), 4096)) for _ in range(rng.randint(1, 5)))
    group = GroupLayout(rng.randint(1, 64), rng.randint(1, 4), shards)
    secret = rng.choice((None, b"", rng.randbytes(40)))
    frame = memoryview(bytearray(rng.randbytes(group.frame_bytes)))
    tokens, parent = rng.randint(1, group.chunk_tokens), rng.randbytes(rng.choice((0, 16, 32, 64)))
    seal(frame, key, group, tokens, parent, rng.random() * 4e9, integrity_key=secret)
    return Case(frame, key, group, secret)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_sealed_checks(seed: int) -> None:
    case = draw(Random(seed))
    header = check(case.frame, len(case.frame), case.key, case.group, integrity_key=case.secret)
    assert [(span.offset, span.length) for span in header.spans] == list(case.group.spans())


@pytest.mark.parametrize("seed", SEEDS)
def test_no_flipped_bit_passes(seed: int) -> None:
    case = draw(rng := Random(seed))
    for part in [
        range(4096),
        *(range(span.offset, span.offset + span.length) for span in case.group.spans()),
    ]:
        for _ in range(8):
            at, bit = rng.choice(part), 1 << rng.randrange(8)
            case.frame[at] ^= bit
            case.assert_refused()
            case.frame[at] ^= bit
    case.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_truncation_passes_even_if_its_whole_length_is_claimed(seed: int) -> None:
    """A store that wrote part and reports the whole, the rest being what the slot held before."""
    case = draw(rng := Random(seed))
    last = case.group.spans()[-1]
    cut = rng.randrange(last.offset + last.length)
    torn = memoryview(bytes(case.frame[:cut]) + bytes(byte ^ 0xFF for byte in case.frame[cut:]))
    case.assert_refused(torn)
    case.assert_refused(length=cut)
    case.assert_refused(case.frame[:cut])


@pytest.mark.parametrize("seed", SEEDS)
def test_no_noise_passes(seed: int) -> None:
    case = draw(rng := Random(seed))
    case.assert_refused(memoryview(rng.randbytes(len(case.frame))))
    case.assert_refused(memoryview(rng.randbytes(rng.randrange(9000))))
    case.assert_refused(memoryview(bytes(len(case.frame))))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_two_pages_can_change_places_and_none_with_another_frames(seed: int) -> None:
    case, other = draw(rng := Random(seed)), draw(Random(seed + 10_000))
    mixed = memoryview(bytearray(case.frame))
    at = 4096 * rng.randrange(len(mixed) // 4096)
    theirs = 4096 * rng.randrange(len(other.frame) // 4096)
    if any(span.offset <= at < span.offset + span.length for span in case.group.spans()) or at == 0:
        mixed[at : at + 4096] = other.frame[theirs : theirs + 4096]
        case.assert_refused(mixed)
