"""The exceptions of kvstow, named by what a handler does with them.

::

    KVStowError
    ├── SettingsError          tell the user which setting, the number and the fix; do not start (a ValueError)
    ├── UnsupportedError       the model, layout or topology is not served: refuse at start (a RuntimeError)
    ├── FrameError             the bytes are not the frame that was asked for: a miss, drop them, count it
    ├── CopyError              a copy between pages and a place failed: report its blocks, recompute
    │   └── FailurePolicyError the user asked that a failed copy ends the engine: let it through to vLLM
    ├── WorkDropped            an executor was closed before the work began: forget it
    └── StoreError             a tier failed
        ├── StoreUnavailable   transient: a miss now, the breaker counts it, ask again later
        └── StoreRefused       permanent for this request: a miss, do not repeat it

A more specific exception is defined where it is raised, and is handled as the one above it that is listed here.
Expected outcomes (a missing key, a full pool) are values, never exceptions.
"""


class KVStowError(Exception):
    """Base of every exception that kvstow raises on purpose."""


class SettingsError(KVStowError, ValueError):
    """A setting is wrong. The message names the setting, the number and the fix."""


class UnsupportedError(KVStowError, RuntimeError):
    """This model, KV layout or topology cannot be served. The message names it and what to do."""


class FrameError(KVStowError):
    """Bytes read from a tier are not a valid frame of the key that was asked for."""


class CopyError(KVStowError):
    """A copy between device pages and a place did not happen, or only in part."""


class FailurePolicyError(CopyError):
    """A copy failed, and ``direct.failure_policy`` is ``raise``: vLLM is meant to stop."""


class WorkDropped(KVStowError):
    """The executor was closed before this work began."""


class StoreError(KVStowError):
    """A tier's store failed."""


class StoreUnavailable(StoreError):
    """Transient: the store could not answer now (timeout, reset, I/O error, no space)."""


class StoreRefused(StoreError):
    """Permanent: the store will never accept this (too large, forbidden, wrong arguments)."""
