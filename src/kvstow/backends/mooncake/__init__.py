"""The Mooncake tier: memory that processes on several hosts lend each other.

Importing this package needs no client library; ``kvstow.backends.mooncake.connect`` needs
Mooncake's.
"""
