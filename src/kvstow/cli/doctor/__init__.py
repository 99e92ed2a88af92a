"""``kvstow doctor``.

Each module checks one thing and takes what it judges as arguments; ``command`` gathers it.
"""

from kvstow.cli.doctor.command import doctor

__all__ = ["doctor"]
