"""Ranks as local processes: what they are told, how they end, and that none stays behind."""

import os
import select
import signal
import sys
import threading

import pytest

from trimtab.localjob import RankError, run_ranks


def rank_program(source):
    return [sys.executable, "-c", source]


def collect():
    lines = []
    return lines, lambda rank, line: lines.append((rank, line))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_get_torchruns_variables():
    lines, on_line = collect()
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    source = f"import os; print(*(os.environ[n] for n in {names!r}), os.environ['EXTRA'])"
    run_ranks(rank_program(source), 3, {"EXTRA": "here"}, on_line)
    words = {rank: line.split() for rank, line in lines}
    assert {rank: w[:5] for rank, w in words.items()} == {
        rank: [str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)
    }
    assert len({w[5] for w in words.values()}) == 1
    assert {w[6] for w in words.values()} == {"here"}


def test_output_of_both_streams_arrives_in_order():
    lines, on_line = collect()
    source = "import sys\nfor i in range(100):\n    print(i, flush=True, file=sys.stderr if i % 2 else sys.stdout)"
    run_ranks(rank_program(source), 1, {}, on_line)
    assert lines == [(0, str(i)) for i in range(100)]


def test_output_that_is_not_text_does_no_harm():
    lines, on_line = collect()
    run_ranks(rank_program(r"import os; os.write(1, b'\xff\xfe ok\n')"), 1, {}, on_line)
    assert lines[0][1].endswith(" ok")


def test_a_failing_rank_ends_the_others():
    lines, on_line = collect()
    source = (
        "import os, signal, sys\n"
        "print(os.getpid(), flush=True)\n"
        "sys.exit('broken') if os.environ['RANK'] == '1' else signal.pause()"
    )
    with pytest.raises(RankError, match="rank 1 ended with exit code 1") as caught:
        run_ranks(rank_program(source), 3, {}, on_line)
    assert caught.value.rank == 1
    assert (1, "broken") in lines
    assert not any(alive(int(line)) for _, line in lines if line.isdigit())


def test_ranks_that_will_not_end_are_killed_with_their_children():
    lines, on_line = collect()
    stubborn = "import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
    source = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline().strip(), flush=True)\n"
        "sys.exit(3)"
    )
    with pytest.raises(RankError):
        run_ranks(rank_program(source), 1, {}, on_line)
    (pid,) = (int(line) for _, line in lines)
    assert ended(pid)


def ended(pid):
    """Has it ended? A kill takes effect when the kernel comes to it, so this waits, but not for ever."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 20)[0])
    finally:
        os.close(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(number):
    pids = []

    def on_line(rank, line):
        pids.append(int(line))
        if len(pids) == 2:
            signal.pthread_kill(threading.main_thread().ident, number)

    source = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        run_ranks(rank_program(source), 2, {}, on_line)
    assert len(pids) == 2
    assert all(ended(pid) for pid in pids)


def test_signal_handlers_are_put_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run_ranks(rank_program(""), 1, {}, lambda rank, line: None)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
