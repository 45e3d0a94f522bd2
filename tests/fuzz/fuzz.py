"""Fuzz one reader with atheris: ``python tests/fuzz/fuzz.py FORMAT [SECONDS]``, or all of them, one after the other.

``make fuzz`` installs atheris and runs this. What breaks a reader's promise (a trace, or a ValueError of one line) is
written to the current directory by libFuzzer, which names the file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

SECONDS = "60"
MEMORY_MIB = 4096
SLOW_S = 20
"""One input that takes longer is a finding, too."""


def fuzz(name: str, seconds: str) -> None:
    """Fuzz the reader of ``name`` in this process, which ends with it."""
    import atheris  # is installed for this alone

    with atheris.instrument_imports(include=["trimtab.traces"]):
        from fuzzed_formats import FUZZED

    one = next(one for one in FUZZED if one.name == name)
    with tempfile.TemporaryDirectory() as folder:
        corpus, work = Path(folder) / "corpus", Path(folder) / "work"
        corpus.mkdir()
        work.mkdir()
        (corpus / "seed").write_bytes(one.seed())
        limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MIB}", f"-timeout={SLOW_S}", "-max_len=65536"]
        atheris.Setup([sys.argv[0], str(corpus), *limits], lambda content: one.try_on(content, work))
        atheris.Fuzz()


def fuzz_all(seconds: str) -> int:
    """Fuzz each reader in a process of its own; the worst exit code."""
    from fuzzed_formats import FUZZED

    commands = [[sys.executable, __file__, one.name, seconds] for one in FUZZED]
    return max(abs(subprocess.run(command, check=False).returncode) for command in commands)


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "all"
    seconds = sys.argv[2] if len(sys.argv) > 2 else SECONDS
    if name == "all":
        return fuzz_all(seconds)
    fuzz(name, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
