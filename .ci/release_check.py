"""Install the wheel and the sdist of dist/ in clean environments, and use them outside the checkout.

release_check.py TORCH [PYTHON...]   each PYTHON is a command; those that are not there are named and skipped

With each: the blocks of README.md run, and so do the tests of a package that `customops new` writes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(torch: str, *pythons: str) -> int:
    built = [*(ROOT / "dist").glob("*.whl"), *(ROOT / "dist").glob("*.tar.gz")]
    if len(built) != 2:
        sys.exit(f"dist/ has to have one wheel and one sdist, and has {len(built)} of them: make dist")
    tried, skipped = [], []
    for python in pythons or [f"python3.{minor}" for minor in range(11, 15)]:
        try:
            version = run(python, "-c", "import platform; print(platform.python_version())").strip()
        except (OSError, subprocess.CalledProcessError):
            skipped.append(python)
            continue
        start = time.perf_counter()
        check(python, torch, built)
        tried.append(version)
        print(f"Python {version}: wheel and sdist, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"tried with Python {', '.join(tried) or 'none'}; not on this machine: {', '.join(skipped) or 'none'}")
    return 0 if tried else 1


def check(python: str, torch: str, packages: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", "env", cwd=folder)
        own = str(Path(folder, "env", "bin", "python"))
        install = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*install, f"torch=={torch}", "numpy", "triton", "pytest", cwd=folder)
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
        Path(folder, "readme.py").write_text("\n".join(blocks), encoding="utf-8")
        for built in packages:
            run(*install, "--force-reinstall", "--no-deps", "--no-cache-dir", str(built), cwd=folder)
            where = run(own, "-c", "import customops; print(customops.__file__)", cwd=folder)
            assert Path(where.strip()).is_relative_to(Path(folder).resolve()), where
            run(own, "readme.py", cwd=folder)
            run(own, "-m", "customops", "new", "package", "fresh_ops", built.name, cwd=folder)
            run(own, "-m", "pytest", "-q", cwd=Path(folder, built.name))
            print(f"  {built.name}: README.md, and the tests of a new package", flush=True)


def run(*command: str, cwd: str | Path | None = None) -> str:
    """What a command prints. If it fails, all it said is printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and cwd is not None:
        print(" ".join(command), done.stdout, done.stderr, sep="\n", file=sys.stderr)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
