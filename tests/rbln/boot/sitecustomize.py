"""Found by every Python whose PYTHONPATH begins with this folder: with RBLN_EMULATE=1 it gets an emulated NPU."""

import os
import sys
from pathlib import Path

if os.environ.get("RBLN_EMULATE") == "1":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.rbln.vendor import boot

    boot()
