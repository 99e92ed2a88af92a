"""The object store tier, S3 and its like, GCS, Azure Blob, a directory: see ``store`` for what it is.

Importing this package needs no client library; ``kvstow.backends.objects.store`` needs obstore.
"""

from kvstow.backends.objects.options import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    Bucket,
    ObjectsOptions,
    parse_url,
)

__all__ = ["MAX_PART_BYTES", "MIN_PART_BYTES", "Bucket", "ObjectsOptions", "parse_url"]
