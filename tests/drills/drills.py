"""The drills: each is one entry here."""

from __future__ import annotations

import errno
import shutil
import signal

import faults_disk as disk
import faults_inside as inside
import faults_job as job
from plan import Drill, Shot

_PLAIN = ("ddp", "fsdp2")
_MINUTE = 60_000_000_000
_SPOILT = disk.directory(shutil.rmtree)
_SAYS_IT = (1, 1)
_SILENT = (0, 0)
_ANYTHING = frozenset(
    {
        "threads",
        "files",
        "gc callbacks",
        "importers",
        "optimizer hooks",
        "works",
        "groups",
        "data",
        "module hooks",
        "exception hooks",
    }
)
"""What cannot be taken away because just that failed."""

DRILLS: tuple[Drill, ...] = (
    # Nothing wrong with trimtab, only with the world around it: everything is recorded.
    Drill("nothing", files="whole", warns=_SILENT, everyday=True),
    Drill("data from a forked worker", job.workers, jobs=_PLAIN, files="whole", warns=_SILENT, everyday=True),
    Drill("a child that leaves at once", job.child(job.nothing_more), files="whole", warns=_SILENT),
    Drill(
        "a child that ends in order",
        job.child(job.as_the_interpreter_ends),
        files="whole",
        warns=_SILENT,
        everyday=True,
    ),
    Drill("other programs are run", job.runs_programs, files="whole", warns=_SILENT),
    Drill("collector off and on", job.no_collector, files="whole", warns=_SILENT),
    Drill("collections everywhere", job.collections_everywhere, files="whole", warns=_SILENT, everyday=True),
    Drill("collector's callbacks cleared", job.clears_collector_callbacks, files="whole", warns=_SILENT, everyday=True),
    Drill("a handler runs all the time", job.alarms, files="whole", warns=_SILENT),
    Drill("attached twice", job.attaches_twice, files="whole", warns=_SAYS_IT, everyday=True),
    Drill("taken off", job.takes_off, warns=_SILENT),
    Drill("taken off and on", job.takes_off_and_on, warns=_SILENT, everyday=True),
    Drill("steps told by many threads", job.session_misused, warns=_SILENT),
    Drill("odd spans", job.odd_spans, files="whole", warns=_SILENT),
    Drill("files rotate", disk.much_to_write, files="whole", warns=_SILENT),
    Drill("the working directory goes", job.together(disk.much_to_write, disk.leave_directory), files="whole"),
    # Every place in trimtab that the job comes through.
    Drill("a hook raises", inside.raises("run"), sites="broken", weight=12, everyday=True),
    Drill("a hook raises for good", inside.raises_for_good("run"), sites="broken", weight=8),
    Drill("attaching raises", inside.raises("attach"), sites="broken", weight=4, everyday=True),
    Drill("detaching raises", inside.raises("detach"), sites="broken", weight=3, leaves=_ANYTHING, everyday=True),
    Drill("the writer raises", inside.raises("writer"), sites="broken", weight=4, everyday=True),
    Drill("the writer raises for good", inside.raises_for_good("writer"), sites="broken", weight=2),
    Drill("the writer is killed", inside.writer_gets(SystemExit), warns=_SAYS_IT),
    Drill("the writer is interrupted", inside.writer_gets(KeyboardInterrupt), warns=_SAYS_IT, everyday=True),
    Drill("no thread to be had", inside.no_threads, warns=_SAYS_IT, everyday=True),
    # Clocks.
    Drill("the clock jumps back", inside.clock(lambda now: now - 60 * _MINUTE), everyday=True),
    Drill("the clock jumps ahead", inside.clock(lambda now: now + 60 * _MINUTE)),
    Drill("the clock stands still", inside.clock(lambda now: 1)),
    Drill("the clock runs backward", inside.clock(lambda now: 2 * 10**9 - now)),
    Drill("the clock gives too much", inside.clock(lambda now: 1 << 70)),
    Drill("the clock gives no number", inside.clock(lambda now: None)),
    Drill("the clock raises", inside.clock(inside.raise_os_error)),
    # Disks and directories.
    Drill("the disk is full", disk.small_disk, warns=_SAYS_IT, possible=disk.can_mount, weight=2, everyday=True),
    Drill("the disk is read-only", disk.read_only_disk, warns=_SAYS_IT, possible=disk.can_mount),
    Drill("the quota is used up", job.together(disk.much_to_write, disk.limited_files), warns=_SAYS_IT),
    Drill(
        "no more file descriptors", job.together(disk.much_to_write, disk.no_more_files), warns=_SAYS_IT, everyday=True
    ),
    Drill("a write finds no room", disk.write_fails(errno.ENOSPC), warns=_SAYS_IT),
    Drill("a write fails", disk.write_fails(errno.EIO), warns=_SAYS_IT),
    Drill("a write hangs", disk.write_hangs, warns=_SAYS_IT, leaves=frozenset({"threads", "files"}), everyday=True),
    Drill("the directory goes", _SPOILT, files="any", weight=2, everyday=True),
    Drill("the directory becomes a file", disk.directory(disk.replace_by_file), files="any"),
    Drill("the files go", disk.directory(disk.remove_files), files="any"),
    Drill("the files are cut", disk.directory(disk.truncate_files)),
    Drill("the files are overwritten", disk.directory(disk.scribble)),
    Drill("no directory to begin with", disk.directory_below_a_file, warns=_SAYS_IT),
    # Nobody to complain to.
    Drill("logging raises", job.together(job.raising_handler, _SPOILT), jobs=("ddp",), files="any", warns=_SILENT),
    Drill("warnings are errors", job.together(job.warnings_are_errors, _SPOILT), jobs=("ddp",), files="any"),
    Drill(
        "no streams", job.together(job.no_stderr(job.drop_streams), _SPOILT), files="any", warns=_SILENT, everyday=True
    ),
    Drill("closed streams", job.together(job.no_stderr(job.close_streams), _SPOILT), jobs=_PLAIN, files="any"),
    Drill("full streams", job.together(job.no_stderr(job.full_streams), _SPOILT), jobs=_PLAIN, files="any"),
    # The job ends, as it would without trimtab.
    Drill("the job raises", job.job_raises, ends="FloatingPointError", files="recent", warns=_SILENT, everyday=True),
    Drill("the process exits", job.dies, ends="exit code 7", files="recent", warns=_SILENT, weight=2),
    Drill(
        "SIGINT",
        shot=Shot(signal.SIGINT),
        long=True,
        ends="KeyboardInterrupt",
        files="recent",
        warns=_SILENT,
        weight=3,
        everyday=True,
    ),
    Drill(
        "SIGINT to all",
        shot=Shot(signal.SIGINT, everyone=True),
        long=True,
        ends="KeyboardInterrupt",
        files="recent",
        warns=_SILENT,
    ),
    Drill(
        "SIGINT twice",
        shot=Shot(signal.SIGINT, everyone=True, then=signal.SIGINT),
        long=True,
        ends="KeyboardInterrupt",
        files="recent",
        weight=2,
        everyday=True,
    ),
    Drill(
        "SIGINT in a collection",
        job.interrupted_while_collecting,
        ends="KeyboardInterrupt",
        warns=_SILENT,
        everyday=True,
    ),
    Drill(
        "SIGTERM", shot=Shot(signal.SIGTERM), long=True, ends="signal SIGTERM", files="recent", warns=_SILENT, weight=3
    ),
    Drill("SIGTERM to all", shot=Shot(signal.SIGTERM, everyone=True), long=True, ends="signal SIGTERM", files="recent"),
    Drill(
        "SIGTERM, and the job has a handler",
        job.exits_when_told,
        shot=Shot(signal.SIGTERM, everyone=True),
        long=True,
        ends="SystemExit",
        files="recent",
        warns=_SILENT,
        everyday=True,
    ),
    Drill(
        "SIGKILL",
        shot=Shot(signal.SIGKILL),
        long=True,
        ends="signal SIGKILL",
        files="recent",
        warns=_SILENT,
        weight=4,
        everyday=True,
    ),
    Drill("SIGSTOP and on", shot=Shot(signal.SIGSTOP, then=signal.SIGCONT), long=True, files="whole", warns=_SILENT),
    Drill(
        "SIGINT inside trimtab",
        inside.signal_at_site(signal.SIGINT, "attach", "run"),
        sites="broken",
        ends="KeyboardInterrupt",
        weight=5,
        everyday=True,
    ),
    Drill(
        "SIGKILL inside trimtab",
        inside.signal_at_site(signal.SIGKILL, "run", "writer", "detach"),
        sites="broken",
        ends="signal SIGKILL",
        weight=4,
    ),
)
