"""The Redis and Valkey tier: ``store`` is the store, ``envelope`` the form of its values, ``session`` its commands.

Importing this package needs no client library; ``kvstow.backends.redis.store`` needs redis-py.
"""
