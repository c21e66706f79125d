"""The client library where the hub's own dependencies are missing."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
for name in ("rocksdict", "pyarrow", "starlette", "uvicorn", "numpy", "pyspark", "numba", "pandas"):
    sys.modules[name] = None  # importing it raises ImportError
import crosswire
for protocol in ("emp", "emqp", "relink", "epoxy", "micromsg2"):
    crosswire.connect(f"{protocol}://127.0.0.1")
import crosswire.client.native.emp, crosswire.client.native.emqp.worker
import crosswire.client.native.epoxy, crosswire.client.native.micromsg2
import crosswire.client.native.relink, crosswire.testing
crosswire.connect_sync
"""


def test_clients_need_no_store_no_web_and_no_spark() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
