"""The object store tier: S3 and compatible stores, GCS, Azure Blob, a shared directory.

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
