"""``trimtab run``: a script runs as if Python had been started with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forked import python
from spool_files import files_of

pytest.importorskip("torch")
pytest.importorskip("trimtab.launch")  # before any fork


def run(tmp_path: Path, script: str, *arguments: str, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """In a fork, or ``anew`` in a Python that has imported nothing."""
    (tmp_path / "job").mkdir(exist_ok=True)
    file = tmp_path / "job" / "train.py"
    file.write_text(script)
    command = ["-m", "trimtab", "run", "--set", f"record.dir={tmp_path}/out", str(file), *arguments]
    return _anew(command, tmp_path) if anew else python(command, tmp_path)


def _anew(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90, check=False)


def test_the_script_finds_what_it_expects_and_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "helper.py").write_text("VALUE = 42")
    script = """
import sys, os, trimtab, helper
assert __name__ == "__main__" and __file__.endswith("train.py")
assert sys.argv[1:] == ["--lr", "0.1", "--help"], sys.argv
assert sys.argv[0] == __file__
assert os.path.samefile(sys.path[0], os.path.dirname(__file__))
assert sys.modules["__main__"].helper.VALUE == 42
with trimtab.span("mine"):
    print("ran")
"""
    done = run(tmp_path, script, "--lr", "0.1", "--help", anew=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
    (file,) = files_of(tmp_path / "out")
    assert [row["name"] for row in file.rows if row["kind"] == "user"] == ["mine"]
    assert file.merged["closed"] is True


FAILING = {
    "alone": "def f():\n    raise KeyError('gone')\n\nf()\n",
    "with a cause": "try:\n    {}['gone']\nexcept KeyError as error:\n    raise ValueError('why') from error\n",
    "with a hook": "import sys\nsys.excepthook = lambda *a: sys.__excepthook__(*a)\nraise KeyError('gone')\n",
    "does not compile": "def f(:\n",
}


@pytest.mark.parametrize("how", FAILING)
def test_an_exception_passes_through_with_the_scripts_own_traceback(tmp_path: Path, how: str) -> None:
    done = run(tmp_path, FAILING[how])
    assert done.returncode == 1
    plain = subprocess.run(
        [sys.executable, tmp_path / "job" / "train.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == plain.stderr
    (file,) = files_of(tmp_path / "out")
    assert file.merged["closed"] is True


def test_exit_codes_pass_through(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys; sys.exit(5)")
    assert (done.returncode, done.stderr) == (5, "")


def test_a_module_runs_like_python_dash_m(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    command = ["-m", "trimtab", "run", "--set", f"record.dir={tmp_path}/out", "-m", "package.train", "a"]
    done = _anew(command, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__ package ['a']\n", "")
    assert len(files_of(tmp_path / "out")) == 1


def test_a_script_that_attaches_itself_gets_the_launchers_session(tmp_path: Path) -> None:
    script = "import trimtab\nsession = trimtab.attach('none.toml')\nsession.step()\n"
    done = run(tmp_path, script)
    assert done.returncode == 0
    assert done.stderr == "trimtab: already attached to this process; this call changes nothing\n"
    (file,) = files_of(tmp_path / "out")
    assert [row["name"] for row in file.rows if row["kind"] != "gc"] == ["step"]


def test_no_such_script_is_one_line(tmp_path: Path) -> None:
    done = python(["-m", "trimtab", "run", "none.py"], tmp_path)
    assert done.returncode == 2
    assert "none.py: no such file" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
