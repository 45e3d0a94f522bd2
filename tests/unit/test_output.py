"""Results are written whole or not at all."""

import os

import pytest

from trimtab.output import replacing, write_text


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "report.json"
    write_text(path, "old")
    write_text(path, "näu")
    assert path.read_bytes() == "näu".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_it_as_far_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "report.json", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "report.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_what_goes_wrong_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "trace.json.gz"
    path.write_text("old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert temporary.name.endswith(".trace.json.gz")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no directory"):
        write_text(tmp_path / "no" / "report.json", "x")


def test_stdout_gets_utf8_whatever_the_terminal_speaks(capfdbinary):
    write_text("-", "näu\n")
    assert capfdbinary.readouterr().out == "näu\n".encode()
