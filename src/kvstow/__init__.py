"""kvstow: stow an inference engine's KV cache in cheaper tiers and restore it instead of recomputing.

Importing this package loads neither vLLM, torch nor any store's client library.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
