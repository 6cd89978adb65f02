"""Run the tests that touch Triton's own code under other versions of Triton: `python tests/adopt/versions.py 3.6.0 3.9.0`.

CI has a single version, because each download has 200 to 290 MB. Installs each version beside the present environment, in a
temporary folder. Triton 3.6's interpreter needs numpy before 2.3.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "adopt",
    "interpreter",
    "kernel_lib",
    "measuring/test_compiler.py",
    "measuring/test_assembly.py",
    "test_compat.py",
    "test_identity.py",
)
_WARNED = "test_capture_of_a_pytest_run_adds_no_warning_to_its_output"
"""A test that counts warnings: numpy 2.2 warns of Triton 3.6's interpreter."""


def tested(version: str) -> int:
    """Return the exit code of the tests under a version of Triton."""
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        older = ["numpy<2.3"] if version.startswith("3.6") else []
        subprocess.run([*pip, f"triton=={version}", *older], check=True)
        path = os.pathsep.join([folder, str(ROOT)])
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(ROOT / "tests" / name) for name in TESTS)]
        command += ["-k", f"not {_WARNED}"] if older else []
        # a hash seed: programs of tests run in a new Python, not in a copy of one that has imported the present numpy
        variables = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        return subprocess.run(command, env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    failed = [version for version in sys.argv[1:] if tested(version)]
    sys.exit(f"failed under triton {', '.join(failed)}" if failed else 0)
