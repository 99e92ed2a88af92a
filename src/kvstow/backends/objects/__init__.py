"""The object store tier: S3 and compatible stores, GCS, Azure Blob, a shared directory.

Importing this package needs no client library; ``kvstow.backends.objects.store`` needs obstore.
"""
