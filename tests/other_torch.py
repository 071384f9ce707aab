"""Run the fast suite on other versions of torch, each in an environment of its own that is thrown away.

    python tests/other_torch.py 2.6.0 2.14.1            # the fast suite
    python tests/other_torch.py 2.6.0 -- tests/test_draws.py

The lower bound of torch in pyproject.toml is the oldest version on which this passes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
EXTRAS = ("cli", "corruptions", "tensorboard", "reproduce", "test")


def requirements() -> list[str]:
    """What the project and the extras that its tests use need, apart from torch."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = [need for extra in EXTRAS for need in project["optional-dependencies"][extra]]
    return sorted({need for need in (*project["dependencies"], *extras) if not re.match(r"torch\b(?!\w)", need)})


def run(version: str, arguments: list[str]) -> int:
    """The exit code of the tests on a version of torch."""
    with tempfile.TemporaryDirectory(prefix="torch-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"torch=={version}", *requirements()], check=True)
        subprocess.run([*install, "--no-deps", "--editable", str(PROJECT)], check=True)
        tests = [python, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *arguments]
        code = subprocess.run(tests, cwd=PROJECT, check=False).returncode
    print(
        f"torch {version}, Python {sys.version.split()[0]}: {'passed' if code == 0 else f'failed (exit code {code})'}"
    )
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="of torch, such as 2.6.0")
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    codes = [run(version, own[split + 1 :]) for version in parser.parse_args(own[:split]).versions]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
