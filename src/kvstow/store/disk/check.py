"""Whether a file holds a whole frame of the key that it is named by, whatever model and layout that is of."""

from __future__ import annotations

from collections.abc import Callable

from kvstow import frame
from kvstow.errors import FrameError
from kvstow.layout import HEADER_BYTES


def frame_check(integrity_key: bytes | None = None) -> Callable[[bytes, memoryview], bool]:
    """A check of the scrub's kind: digest of the key and the file's bytes in, whole or not out."""

    def check(digest: bytes, whole: memoryview) -> bool:
        try:
            page = whole[:HEADER_BYTES]
            header = frame.parse_header(page)
            if header.key.digest() != digest or header.frame_length != len(whole):
                return False
            payload = frame.PayloadChecksum(integrity_key)
            for span in header.spans:
                payload.update(whole[span.offset : span.offset + span.length])
            frame.verify(page, header, payload, integrity_key=integrity_key)
        except FrameError:
            return False
        return True

    return check
