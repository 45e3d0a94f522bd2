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

    with pytest.raises(ValueError if error is OSError else error):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no directory"):
        write_text(tmp_path / "no" / "report.json", "x")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder", "is a directory"),
        ("x" * 300, "file name too long"),
        ("no/where", "there is no directory"),
        ("file/x", "there is no directory"),
        ("full", "no space left on device"),
    ],
)
def test_what_cannot_be_written_is_one_line_with_its_name(tmp_path, name, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=says) as caught:
        write_text(tmp_path / name, "x")
    assert str(caught.value).startswith(f"{tmp_path / name}: cannot be written (")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "full"]


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "x"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(tmp_path / "pipe", "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_closed_stdout_is_said(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(ValueError, match="the standard output is closed"):
        write_text("-", "x")


def test_stdout_gets_utf8_whatever_the_terminal_speaks(capfdbinary):
    write_text("-", "näu\n")
    assert capfdbinary.readouterr().out == "näu\n".encode()
