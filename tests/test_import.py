"""What `import jaxfedmvc` brings with it: little that is not its own."""

import subprocess
import sys

SLOW = ("sklearn", "pandas", "matplotlib", "scipy.stats", "scipy.optimize", "flwr", "torch")


def test_what_is_slow_to_import_waits_until_it_is_used():
    code = f"import sys, jaxfedmvc; print([m for m in {SLOW} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "[]"
