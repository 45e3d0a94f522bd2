"""trimtab watch, with ranks that speak over the real channel: what it prints, how it ends, and that nothing is left."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from online_jobs import Job
from rich.console import Console
from test_online_detect import slow

from trimtab import cli
from trimtab.config import Config
from trimtab.control.messages import to_json
from trimtab.control.opening import join, meet
from trimtab.control.rendezvous import RENDEZVOUS_FILE
from trimtab.record.live import live
from trimtab.scan.online.summary import encode
from trimtab.watch import command as command_module
from trimtab.watch import source
from trimtab.watch.command import LOG_FILE, Options, address_of, watch

pytestmark = pytest.mark.timeout(60)
CONFIG = Config()
DEADLINE = 40.0


def wait_for(condition):
    """Until ``condition()``; something else is awaited here than time."""
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def speak(directory, job, steps, said_by=None, begin=None):
    """Be the ranks of ``job``: meet the hub, tell of the steps once ``begin`` says so, and leave."""
    wait_for((directory / RENDEZVOUS_FILE).exists)
    wait_for(begin or (lambda: True))
    ranks = [join(f"rank.{rank}", CONFIG.control, directory, os.environ) for rank in range(job.ranks)]
    for rank in ranks:
        assert rank.wait_connected(DEADLINE)
        rank.answer("window", lambda message: message.body)
    for number in range(steps):
        for summary in job.step(number):
            ranks[(said_by or {}).get(summary.rank, summary.rank)].publish(source.SUMMARY, to_json(encode(summary)))
    for rank in ranks:
        rank.close()


@contextmanager
def speaking(*arguments, **more):
    thread = threading.Thread(target=speak, args=arguments, kwargs=more)
    thread.start()
    yield
    thread.join(DEADLINE)
    assert not thread.is_alive()


def watched(options, capsys=None):
    """Whether something was found, and what was printed and told."""
    console = Console(file=io.StringIO(), width=80, height=24)
    told = []
    found = watch(options, CONFIG, os.environ, console, told.append)
    return found, console.file.getvalue(), told


def left_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_subjects_are_those_on_which_ranks_publish():
    assert (source.SUMMARY, source.HEARTBEAT) == (live.SUMMARY, live.HEARTBEAT)
    assert live.rank_name(3) == "rank.3"


def test_lines_name_the_culprit_and_the_log_keeps_it(tmp_path):
    job = Job(ranks=6, noise=0.01, disturb=slow(3, 1.4, first=30))
    with speaking(tmp_path, job, 40):
        found, out, told = watched(Options(str(tmp_path), grace=0.0))
    assert found
    assert told == []
    (alarm,) = [line for line in out.splitlines() if line.startswith(" ALARM ")]
    assert "Rank 3 (node-0) computes 1." in alarm
    assert "A profiler window of 3 steps opens on rank 3 and its peers 4, 5." in out
    assert left_in(tmp_path) == [LOG_FILE]
    logged = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert [line["event"] for line in logged][:2] == ["alarm", "note"]
    assert logged[0]["alarm"]["ranks"] == [3]


def test_once_shows_one_picture(tmp_path):
    with speaking(tmp_path, Job(ranks=6), 30):
        found, out, _ = watched(Options(str(tmp_path), once=True))
    assert not found
    assert "> " not in out
    assert out.count("rank 5") == 1
    assert left_in(tmp_path) == []


def test_json_is_one_object_a_line(tmp_path, capsys):
    with speaking(tmp_path, Job(ranks=4, noise=0.01), 40):
        watched(Options(str(tmp_path), json=True, every=0.2, grace=0.0))
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["event"] for line in said} == {"state"}
    assert (said[-1]["ranks"], said[-1]["step"], said[-1]["ready"], said[-1]["alarms"]) == (4, 39, True, [])


def test_a_rank_cannot_speak_for_another(tmp_path):
    with speaking(tmp_path, Job(ranks=4), 3, said_by={2: 1}):
        _, out, _ = watched(Options(str(tmp_path), grace=0.0))
    assert "3 of 4 ranks heard" in out


def test_a_second_one_joins_the_hub_of_the_first(tmp_path):
    with (
        meet("first", CONFIG.control, tmp_path, os.environ) as first,
        speaking(tmp_path, Job(ranks=6), 40, begin=lambda: any("watch" in name for name in first.names)),
    ):
        _, out, _ = watched(Options(str(tmp_path), once=True))
    assert "6 ranks" in out


def test_ranks_that_have_come_and_gone_before_it_looks_are_heard(tmp_path, monkeypatch):
    @contextmanager
    def meet_late(*arguments):
        with meet(*arguments) as endpoint:
            speak(tmp_path, Job(ranks=4), 3)  # a busy machine lets this program wait as long
            wait_for(lambda: not endpoint.names)
            yield endpoint

    monkeypatch.setattr(command_module, "meet", meet_late)
    _, out, _ = watched(Options(str(tmp_path), grace=0.0))
    assert "4 ranks" in out


def test_metrics_are_served_where_it_was_asked_for(tmp_path):
    with speaking(tmp_path, Job(ranks=4), 3):
        _, _, told = watched(Options(str(tmp_path), prometheus="127.0.0.1:0", grace=0.0))
    assert told[0].startswith("metrics: http://127.0.0.1:")


def test_addresses_are_on_loopback_unless_they_name_a_host():
    assert address_of("9464") == address_of(":9464") == ("127.0.0.1", 9464)
    assert address_of("0.0.0.0:9464") == ("0.0.0.0", 9464)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/does/not/exist", "no such directory; give "),
        ("nonsense", "no such directory; give "),
        (__file__, "not a directory; give "),
    ],
)
def test_what_is_no_run_is_told_in_one_line(target, said):
    with pytest.raises(ValueError, match=said):
        watched(Options(target))


def command(monkeypatch, *arguments):
    """Exit code of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["trimtab", "watch", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_the_dashboard_is_written(monkeypatch, tmp_path):
    assert command(monkeypatch, "--grafana", tmp_path / "d.json") == 0
    assert json.loads((tmp_path / "d.json").read_text())["title"] == "trimtab watch"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give record.dir of the job, or host:port of a hub"),
        ((".", "--json", "out.json"), "--json out.json: lines are written as they come"),
        ((".", "--prometheus", "localhost:web"), "not an address"),
        (("/does/not/exist",), "/does/not/exist: no such directory"),
    ],
)
def test_bad_usage_is_told_in_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("found", "arguments", "code"), [(True, ["--fail-on", "finding"], 3), (True, [], 0)])
def test_what_was_found_can_be_the_exit_code(monkeypatch, tmp_path, found, arguments, code):
    monkeypatch.setattr("trimtab.watch.command.watch", lambda *_: found)
    assert command(monkeypatch, tmp_path, *arguments) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tmp_path, number):
    command = [sys.executable, "-m", "trimtab", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for((tmp_path / RENDEZVOUS_FILE).exists)
        process.stdout.readline()
        process.send_signal(number)
        _, error = process.communicate(timeout=DEADLINE)
    assert (process.returncode, error) == (130, "trimtab: interrupted\n")
    assert left_in(tmp_path) == []
