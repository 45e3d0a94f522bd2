"""The collector over a real hub, with ranks that answer as those of a job do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scope_job import CONFIG, FakeRank, connected, frame_of, future_of, wait

from trimtab.control.endpoint import Complaints
from trimtab.control.messages import to_json
from trimtab.control.opening import join
from trimtab.control.rendezvous import RENDEZVOUS_FILE
from trimtab.scope.collector.audit import read_audit
from trimtab.scope.collector.claims import MOST_CLAIMS, ORPHANED_SECONDS, Own
from trimtab.scope.collector.connection import Seat, scope_folder
from trimtab.scope.collector.director import Director
from trimtab.scope.collector.doing import Desk
from trimtab.scope.collector.interface import Notice, Received
from trimtab.scope.collector.opening import open_scope
from trimtab.scope.collector.ranks import GONE_SECONDS, SILENT_SECONDS, Beat, Ranks
from trimtab.scope.commands.listing import _wish
from trimtab.scope.frame import encode
from trimtab.scope.messages import DO, FRAME, rank_endpoint
from trimtab.scope.names import Tap, is_stored
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.recording.reader import open_recording
from trimtab.scope.subscription import MOST_SUBSCRIPTIONS, Subscription, When

ENVIRONMENT = {"TRIMTAB_CONTROL_SECRET": "a secret that is long enough"}
WORLD = 4


class Job:
    """A run directory, and ranks that train in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks = [FakeRank(rank, WORLD, page=50) for rank in range(WORLD)]

    def open(self, **more):
        quiet = Complaints(lambda _text: None)
        return open_scope(self.directory, CONFIG, ENVIRONMENT, complaints=more.pop("complaints", quiet))

    def join(self, scope=None) -> None:
        connected(self.directory, ENVIRONMENT, self.ranks)
        if scope is not None:
            assert scope.wait(lambda ranks: ranks.showing, 10)

    def train(self, steps: int = 40) -> None:
        for rank in self.ranks:
            rank.train(steps)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def job(tmp_path):
    before = set(threading.enumerate())  # of other tests, whatever they left
    found = Job(tmp_path)
    yield found
    found.close()
    wait(lambda: not set(threading.enumerate()) - before, "all threads have ended")


def frames_in(heard) -> list[Received]:
    return [one for one in heard if isinstance(one, Received)]


def test_from_a_wish_to_frames_a_recording_and_back(job):
    with job.open() as scope:
        job.join(scope)
        heard = []
        stop = scope.listen(heard.append)
        name = scope.subscribe(Subscription("layers.{1,2}.mlp.hidden", when=When(every=2)))
        wish = scope.status()["subscriptions"][name]
        assert wish["ranks"] == [0, 1, 2, 3]
        assert wish["matched"] == ["layers.1.mlp.hidden", "layers.2.mlp.hidden"]
        assert {rank.due.popitem()[1][0] if rank.due else wish["step"] for rank in job.ranks} == {wish["step"]}
        # popped above, so that the ranks show what was agreed; it is asked for again
        scope.unsubscribe(name)
        job.train()
        assert not any(rank.active for rank in job.ranks)

        name = scope.subscribe(Subscription("layers.{1,2}.mlp.hidden", when=When(every=2)))
        end = scope.record("clean")
        with pytest.raises(ValueError, match="being written already"):
            scope.record()
        job.train(41)
        count = sum(rank.step // 2 - (scope.status()["subscriptions"][name]["step"] - 1) // 2 for rank in job.ranks)
        wait(lambda: len(frames_in(heard)) == count, f"{count} frames, not {len(frames_in(heard))}")
        first = frames_in(heard)[0]
        assert encode(first.frame) == bytes(first.raw)
        end()
        stop()
        scope.unsubscribe(name)
        assert not scope.status()["subscriptions"]
        recording = open_recording(job.directory)
        assert len(list(recording.frames())) == count
        assert recording.subscriptions()[name]["when"]["every"] == 2
        assert recording.ranks()[3] == {"tp": 1, "pp": 1}
        job.train(200)
        assert not any(rank.active for rank in job.ranks)


def test_taps_status_and_refusals(job):
    with job.open() as scope:
        with pytest.raises(ValueError, match="no rank has been heard of yet"):
            scope.taps()
        job.join(scope)
        assert [one.name for one in scope.taps("layers.*.output")] == [f"layers.{n}.output" for n in range(4)]
        assert scope.taps("layers.0.mlp.hidden")[0].ranks == (0, 1)
        status = scope.status()
        assert (status["state"], status["world_size"], status["step"], status["missing"]) == ("live", 4, 10, [])
        for wish, says in (
            (Subscription("layers.*.outputs"), "no tap matches .*close to it: layers.0-3.output"),
            (Subscription("layers.*.output", layers=(7,)), "no tap matches .* in layer 7"),
            (Subscription("layers.3.output", ranks=(0,)), "it is on rank 2, 3"),
            (Subscription("layers.3.output", ranks=(9,)), "there is no such rank"),
            (Subscription("layers.3.output", when=When(last=4)), "step 4 is over: the job is at step 10"),
            (Subscription("layers.[a].output"), "is no range"),
            (Subscription("layers.3.output", when=When(every=0)), "every"),
        ):
            with pytest.raises(ValueError, match=says):
                scope.subscribe(wish)
        with pytest.raises(ValueError, match="no subscription or probe of that name; there is none"):
            scope.unsubscribe("s-0000")
        job.ranks[1].refuses = "rank 1 may not be disturbed"
        with pytest.raises(ValueError, match="rank 1: rank 1 may not be disturbed"):
            scope.perturb(Perturbation("layers.0.output", "zero"))
        assert not any(rank.due or rank.active for rank in job.ranks)


def test_a_perturbation_comes_is_told_of_and_is_reverted(job):
    with job.open() as scope:
        job.join(scope)
        flip = Perturbation("layers.0.output", "bit-flip", 100, 101, parameters={"bits": [3]})
        preview = scope.preview(flip)
        assert (preview["taps"], preview["ranks"], preview["problems"]) == (["layers.0.output"], [0, 1], [])
        assert "bit 3" in preview["text"]
        late = scope.preview(Perturbation("layers.0.output", "zero", 11, 12))
        assert f"step 11 is over or too near: give {late['step']} or later" in late["problems"]
        assert "no tap matches" in scope.preview(Perturbation("nothing", "zero"))["problems"][0]

        name = scope.perturb(flip)
        wish = scope.status()["perturbations"][name]
        assert wish["ranks"] == [0, 1]
        assert wish["step"] <= 100
        with pytest.raises(ValueError, match="step 12 is over or too near"):
            scope.perturb(Perturbation("layers.0.output", "zero", 12, 12))
        job.train(100)
        assert list(job.ranks[0].active) == [name]

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(scope.revert, name)
            wait(lambda: all(rank.due for rank in job.ranks[:2]), "the ranks are told")
            job.train(100)
            said = asked.result(10)
        assert said["silent"] == []
        assert {rank: notice["details"] for rank, notice in said["ranks"].items()} == {
            "0": {"elements": 1},
            "1": {"elements": 1},
        }
        assert not job.ranks[0].active
        with pytest.raises(ValueError, match=f"{name} is put back already"):
            scope.revert(name)


def test_replicas_that_differ_are_an_alarm(job):
    with job.open() as scope:
        job.join(scope)
        heard = []
        scope.listen(heard.append, frames=False)
        for rank in job.ranks[:2]:  # layers.0.output is the same on both
            tap = next(tap for tap in rank.taps if tap.name == "layers.0.output")
            frame = frame_of(tap, rank.rank, 120)
            if rank.rank == 1:
                frame.arrays["vector"] = np.nextafter(frame.arrays["vector"], np.inf)
            rank.client.publish(FRAME, encode(frame))
        wait(lambda: any(one.kind == "replicas" for one in heard), "the alarm")
        text = next(one.text for one in heard if one.kind == "replicas")
        assert text in {
            f"replicas disagree: layers.0.output, step 120, microbatch 0: rank {a} differs from rank {b}"
            for a, b in ((0, 1), (1, 0))
        }


def test_a_rank_speaks_for_itself_only_and_rubbish_is_counted(job):
    said = []
    with job.open(complaints=Complaints(said.append)) as scope:
        job.join(scope)
        heard = []
        scope.listen(heard.append)
        liar = job.ranks[0]
        liar.client.publish(FRAME, encode(frame_of(liar.taps[0], 3, 5)))
        liar.client.publish(FRAME, b"rubbish")
        liar.client.publish("scope.beat", to_json(liar.beat(rank=2)))
        liar.client.publish("scope.notice", to_json({"kind": "error", "rank": -1}))
        liar.client.publish(FRAME, encode(frame_of(liar.taps[0], 0, 5)))
        wait(lambda: frames_in(heard), "the true one")
        assert [one.frame.rank for one in frames_in(heard)] == [0]
        assert scope.status()["refused"] == 4
        assert any("scope.0 speaks for rank 3" in line for line in said)


def test_a_second_process_is_a_client_of_the_first_and_takes_its_place(job):
    with job.open() as first:
        job.join(first)
        with job.open() as second:
            assert (first.leads, second.leads) == (True, False)
            assert [one.name for one in second.taps("layers.*.output")] == [f"layers.{n}.output" for n in range(4)]
            assert second.status()["world_size"] == WORLD
            with pytest.raises(ValueError, match=r"no tap matches 'layers\.x'; close"):
                second.subscribe(Subscription("layers.x"))
            heard = []
            second.listen(heard.append)
            name = second.subscribe(Subscription("layers.0.output"))
            assert name in first.status()["subscriptions"]
            job.train()
            wait(lambda: frames_in(heard), "frames in the second process")
            flip = Perturbation("layers.0.output", "zero", 1000, 1001)
            assert second.preview(flip)["ranks"] == [0, 1]
            assert second.perturb(flip) in second.status()["perturbations"]
            left = first.subscribe(Subscription("layers.1.output"))
            job.train(100)
            first.close()
            job.close()  # the hub went with the first; ranks come to the next one
            wait(lambda: second.leads and second.ranks.state == "waiting", "it takes the first one's place")
            job.join(second)
            status = second.status()
            mine, other = status["subscriptions"][name], status["subscriptions"][left]
            assert (mine["adopted"], mine["orphaned"], mine["state"]) == (True, False, "active")
            assert other["orphaned"], "who asked for it is gone"
            second.unsubscribe(name)
            job.train(100)
            assert name not in job.ranks[0].active


def test_a_rank_that_starts_again_is_told_what_it_had_to_do(job):
    with job.open() as scope:
        job.join(scope)
        name = scope.subscribe(Subscription("layers.0.*.hidden"))
        job.train()
        job.ranks[1].close()
        job.ranks[1] = FakeRank(1, WORLD, started=2, page=50, step=60)
        job.ranks[1].connect(job.directory, ENVIRONMENT)
        wait(lambda: job.ranks[1].due, "it is told")
        job.ranks[1].train(100)
        assert list(job.ranks[1].active) == [name]


def test_ranks_that_leave_and_a_job_that_ends(job):
    with job.open() as scope:
        job.join(scope)
        heard = []
        scope.listen(heard.append)
        job.ranks[3].say(leaving=True)
        job.ranks[3].close()
        assert scope.wait(lambda ranks: ranks.missing == [3], 10)
        with pytest.raises(ValueError, match="this takes all ranks, and rank 3 cannot be reached"):
            scope.pair({"perturbations": []})
        for rank in job.ranks:
            rank.say(leaving=True)
        job.close()
        assert scope.wait(lambda ranks: ranks.state == "ended", 10)
        with pytest.raises(ValueError, match="the job has ended"):
            scope.subscribe(Subscription("layers.0.output"))
        assert "rank 3 has left" in [one.text for one in heard if isinstance(one, Notice)]


def test_what_a_listener_raises_is_said_and_the_others_hear(job):
    said = []
    with job.open(complaints=Complaints(said.append)) as scope:
        job.join(scope)
        heard = []
        scope.listen(lambda _: 1 / 0)
        scope.listen(heard.append)
        job.ranks[0].notice("paused", text="over its budget")
        wait(lambda: heard, "the notice")
        assert heard[-1].text == "over its budget"
        assert "a listener of scope: ZeroDivisionError" in said[0]


# ------------------------------------------------------------------------ without a hub


def test_where_there_is_no_run_directory(tmp_path):
    with pytest.raises(ValueError, match=r"no such directory; give record\.dir"):
        scope_folder(tmp_path / "no")
    (tmp_path / "scope").write_text("a file")
    with pytest.raises(ValueError, match="cannot be made"):
        scope_folder(tmp_path)


def test_one_seat(tmp_path):
    one, two = Seat(tmp_path), Seat(tmp_path)
    assert one.take()
    assert one.take()
    assert not two.take()
    one.leave()
    assert two.take()
    two.leave()
    with pytest.raises(ValueError, match="cannot be written"):
        Seat(tmp_path / "no").take()


def beat(rank: int, **more) -> Beat:
    return Beat.from_dict(FakeRank(rank, 2).beat(**more))


def test_who_is_there():
    ranks = Ranks()
    assert (ranks.state, ranks.complete) == ("waiting", False)
    assert [change.kind for change in ranks.hear(beat(0), 0.0)] == ["came"]
    assert ranks.missing == [1]
    ranks.hear(beat(1, step=12, seconds_per_step=0.03), 0.0)
    assert (ranks.complete, ranks.settled, ranks.step) == (True, False, 12)
    assert ranks.seconds_per_step == pytest.approx(0.02)
    ranks.answered(0, 0.0)
    ranks.answered(1, 0.0)
    assert ranks.settled
    assert [change.kind for change in ranks.hear(beat(1, started=9), 1.0)] == ["restarted"]
    assert ranks.silent(SILENT_SECONDS + 0.5) == [0]
    assert ranks.silent(SILENT_SECONDS + 0.6) == []  # asked once
    assert [change.kind for change in ranks.lost(0)] == ["left"]
    assert ranks.lost(0) == []
    assert [change.kind for change in ranks.hear(beat(0), 7.0)] == ["back"]
    ranks.hear(beat(1), 7.0)
    assert [change.rank for change in ranks.late(8.0 + GONE_SECONDS)] == [0, 1]
    assert ranks.state == "ended"


def test_a_rank_that_learns_where_it_stands_is_news():
    ranks = Ranks()
    ranks.hear(beat(0, coordinates={}), 0.0)
    assert ranks.hear(beat(0, coordinates={}), 1.0) == []
    assert [change.kind for change in ranks.hear(beat(0), 2.0)] == ["placed"]
    assert ranks.hear(beat(0), 3.0) == []


def test_a_recording_that_began_before_the_models_were_built_has_the_layout(job):
    with job.open() as scope:
        for rank in job.ranks:
            rank.knows_its_place = False
        job.join()
        assert scope.wait(lambda ranks: ranks.complete, 10)
        end = scope.record()
        for rank in job.ranks:
            rank.knows_its_place = True
            rank.say()
        assert scope.wait(lambda ranks: all(one.coordinates for one in ranks.beats.values()), 10)
        end()
        assert open_recording(job.directory).ranks()[3] == {"tp": 1, "pp": 1}


@pytest.mark.parametrize("change", [{"rank": -1}, {"world_size": 0}, {"step": "3"}, {"subscriptions": []}])
def test_beats_that_make_no_sense(change):
    with pytest.raises(ValueError, match="beat: "):
        Beat.from_dict(FakeRank(0, 2).beat() | change)
    assert Beat.from_dict(FakeRank(0, 2).beat() | {"of a later version": 1}).rank == 0


def director_of(ranks: list[FakeRank], said: list[Notice]) -> Director:
    known = Ranks()
    for rank in ranks:
        known.hear(Beat.from_dict(rank.beat()), 0.0)
    return Director(
        lambda: known, lambda rank, subject, body: future_of(lambda: ranks[rank].answer(subject, body)), said.append
    )


def test_limits_pages_and_numbers_of_changes():
    ranks, said = [FakeRank(rank, 2, page=1) for rank in range(2)], []
    director = director_of(ranks, said)
    assert len(director.taps("**")) == 6
    for _ in range(MOST_SUBSCRIPTIONS):
        director.subscribe(Subscription("layers.0.output"))
    with pytest.raises(ValueError, match="64 subscriptions already"):
        director.subscribe(Subscription("layers.0.output"))
    changes = list(ranks[0].due)
    assert changes == sorted(changes, key=lambda name: (len(name), name))  # ranks apply them in this order
    assert [notice.kind for notice in said] == ["agreed"] * MOST_SUBSCRIPTIONS


def test_subscriptions_whose_last_step_is_over_make_room():
    ranks = [FakeRank(rank, 2) for rank in range(2)]
    known = Ranks()
    director = Director(
        lambda: known, lambda rank, subject, body: future_of(lambda: ranks[rank].answer(subject, body)), lambda _: None
    )
    for rank in ranks:
        known.hear(Beat.from_dict(rank.beat()), 0.0)
    old = director.subscribe(Subscription("layers.0.output", when=When(last=50)))
    for rank in ranks:
        rank.train(60)
        known.hear(Beat.from_dict(rank.beat()), 1.0)
    new = director.subscribe(Subscription("layers.0.output"))
    assert list(director.wishes("subscription")) == [new]
    assert old in [body["body"]["id"] for subject, body in ranks[0].asked if body.get("kind") == "unsubscribe"]


def test_what_has_ended_by_itself_is_known_to_have():
    ranks = [FakeRank(rank, 2) for rank in range(2)]
    director = director_of(ranks, [])
    name = director.perturb(Perturbation("layers.0.output", "zero"))
    director.noticed(Notice("activated", rank=0, perturbation=name))
    director.noticed(Notice("expired", rank=0, perturbation=name))
    assert not director.wishes("perturbation")[name]["ended"]
    director.noticed(Notice("expired", rank=1, perturbation=name))
    assert director.wishes("perturbation")[name]["ended"]
    pair = director.pair({"perturbations": []})
    for rank in range(2):
        director.noticed(Notice("paired", rank=rank, details={"pair": pair}))
    assert director.wishes("pair")[pair]["ended"]


def test_of_what_passed_by_only_some_is_remembered_and_what_is_stored_can_be_put_back():
    ranks = [FakeRank(rank, 2) for rank in range(2)]
    director = director_of(ranks, [])
    director.adopt(0, {"revertible": ["p-stored"]})
    names = []
    for _ in range(70):
        names.append(director.perturb(Perturbation("layers.0.output", "zero")))
        for rank in range(2):
            director.noticed(Notice("expired", rank=rank, perturbation=names[-1]))
    known = director.wishes("perturbation")
    assert list(known) == ["p-stored", *names[-64:]]
    assert known["p-stored"]["stored"]
    passed = known[names[-1]]
    assert (passed["state"], passed["stored"]) == ("ended", False)
    assert _wish(known["p-stored"]).startswith("ranks 0; over; can be reverted")
    assert _wish(passed) == f"zero of layers.0.output; from step {passed['step']}, ranks 0-1; over"
    assert [is_stored(name) for name in ("parameters.x", "optimizer.x.master", "layers.0.output")] == [
        True,
        True,
        False,
    ]


def test_what_nobody_claims_is_an_orphan():
    now, told = [0.0], []
    clock = lambda: now[0]  # noqa: E731
    ranks = [FakeRank(rank, 2) for rank in range(2)]
    known = Ranks()
    for rank in ranks:
        known.hear(Beat.from_dict(rank.beat()), 0.0)
    director = Director(
        lambda: known,
        lambda rank, subject, body: future_of(lambda: ranks[rank].answer(subject, body)),
        lambda _: None,
        clock,
    )
    name = director.subscribe(Subscription("layers.0.output"))
    own = Own(lambda names: (told.append(names), director.claims.take(names))[0], clock)
    own.add(name)
    own.turn()
    now[0] = ORPHANED_SECONDS - 0.5
    own.turn()
    assert told == [[name]] * 2
    now[0] = ORPHANED_SECONDS + 1
    said = director.wishes("subscription")[name]
    assert (said["state"], said["orphaned"]) == ("active", False)
    assert _wish(said).endswith("; active")
    own.remove(name)
    now[0] = 2 * ORPHANED_SECONDS
    own.turn()
    assert len(told) == 2
    director.heard(Beat.from_dict(ranks[1].beat(subscriptions={name: "budget"})))
    said = director.wishes("subscription")[name]
    assert (said["state"], said["orphaned"]) == ("paused", True)
    assert _wish(said).endswith("orphaned: whoever asked for it is gone; paused, as it is over the budget, on rank 1")
    director.claims.take([name])
    assert not director.wishes("subscription")[name]["orphaned"]


def test_own_tells_another_collector_at_once_and_of_the_newest_only():
    told = []
    own = Own(told.append, lambda: 0.0)
    for number in range(MOST_CLAIMS + 2):
        own.add(f"s-{number}")
    own.turn()
    own.turn()
    assert len(told) == 1
    own.turn(anew=True)
    assert (len(told), len(told[1]), told[1][0]) == (2, MOST_CLAIMS, "s-2")


def test_attention_under_context_parallelism_is_for_all_ranks_or_none():
    taps = [Tap("layers.0.attention.map", "attention", shard=(("cp", rank, 2),), layer=0) for rank in range(2)]
    ranks = [FakeRank(rank, 2, taps=[taps[rank]], seconds_per_step=0.1) for rank in range(2)]
    director = director_of(ranks, [])
    wish = Subscription("layers.0.attention.map", "attention")
    with pytest.raises(ValueError, match="takes all ranks of a layer"):
        director.subscribe(replace(wish, ranks=(0,)))
    name = director.subscribe(wish)
    assert director.wishes("subscription")[name]["step"] == 10 + 1 + 20  # two seconds, so that nobody can be late
    assert director.wishes("subscription")[name]["ranks"] == [0, 1]


def test_a_subscription_that_costs_too_much_and_cannot_be_paused_is_ended_everywhere(job):
    with job.open() as scope:
        job.join(scope)
        name = scope.subscribe(Subscription("layers.*.output"))
        details = {"why": "budget", "end": True}
        job.ranks[0].notice("error", subscription=name, text="over its budget", details=details)
        job.ranks[1].notice("error", subscription=name, text="over its budget", details=details)
        wait(lambda: not scope.status()["subscriptions"], "it is ended")
        job.train(100)
        assert not any(rank.active for rank in job.ranks)


def test_results_of_pairs_when_all_ranks_have_said_theirs(job):
    with job.open() as scope:
        job.join(scope)
        assert scope.pair_result("d-1") is None
        row = ["layers.0.output", 20, "()", 0, 1.0, 4.0, 0.5, 2.0, 0]
        for rank in job.ranks:
            part = {"pair": "d-1", "rank": rank.rank, "first_step": 20, "steps": 1, "tolerance": 1e-3, "rows": [row]}
            rank.notice("paired", details={"pair": "d-1", "part": part})
        wait(lambda: scope.pair_result("d-1") is not None, "all have said theirs")
        assert scope.pair_result("d-1")["parts_at"]["tap"] == "layers.0.output"


def test_all_ranks_of_a_large_job_can_be_asked_at_the_same_time(job):
    with job.open() as scope:
        client = scope._connection.client
        client.close()  # nothing goes out any more
        client._ended = False
        for rank in range(5000):
            client.request(rank_endpoint(rank), "scope.prepare", b"{}" * 100)
        assert client.dropped == 0


def test_communication_need_not_be_listed():
    ranks = [FakeRank(rank, 2) for rank in range(2)]
    director = director_of(ranks, [])
    delay = Perturbation("p2p.recv.forward", "delay", 200, 201, parameters={"ms": 5.0})
    assert director.preview(delay)["ranks"] == [0, 1]
    with pytest.raises(ValueError, match="no tap matches"):  # of the ranks, who know better
        director.perturb(delay)
    assert {subject for subject, _ in ranks[0].asked} >= {"scope.prepare"}


def test_what_others_may_ask_of_the_collector(job):
    with job.open() as scope:
        job.join(scope)
        quiet = Complaints(lambda _text: None)
        other = join("someone", CONFIG, job.directory, ENVIRONMENT, complaints=quiet)
        try:
            assert other.wait_connected(5)
            for body, says in (
                (b"[1]", "expected an object"),
                (b"nonsense", "JSON"),
                (to_json({"op": "result", "ticket": "x"}), "no such ticket"),
            ):
                with pytest.raises(Exception, match=says):
                    other.request("scope", DO, body).result(5)
            with ThreadPoolExecutor(1) as pool:
                desk = Desk(scope, pool)
                for body, says in (
                    ({"op": "close"}, "op is to be one of"),
                    ({"op": "taps", "patern": "x"}, "'patern' is unknown; pattern?"),
                    ({"op": "subscribe", "subscription": {"pattern": ""}}, "tap: a pattern"),
                    ({"op": "unsubscribe"}, "id is missing"),
                ):
                    ticket = desk.answer(body)["ticket"]
                    wait(lambda at=ticket: desk._tickets[at].done(), "it is done")
                    said = desk.answer({"op": "result", "ticket": ticket})
                    assert (said["state"], says in said["reason"]) == ("refused", True), said
            with pytest.raises(Exception, match="is not connected"):
                other.request(rank_endpoint(7), DO, b"").result(5)
        finally:
            other.close()


def test_audit_files_of_all_ranks_in_order_of_time(tmp_path):
    (tmp_path / "audit-r0.jsonl").write_bytes(b'{"unix_ns":3,"rank":0}\n\xff\xfe\n[1]\n{"unix_ns":1,"rank":0}\n{"cut')
    (tmp_path / "audit-r1.jsonl").write_bytes(b'{"unix_ns":2,"rank":1}\n')
    assert [(entry["unix_ns"], entry["rank"]) for entry in read_audit(tmp_path)] == [(1, 0), (2, 1), (3, 0)]


def test_the_file_of_a_hub_that_was_killed_holds_nobody_up(job):
    with job.open():
        left = (job.directory / RENDEZVOUS_FILE).read_bytes()
    (job.directory / RENDEZVOUS_FILE).write_bytes(left)  # as SIGKILL leaves it
    began = time.monotonic()
    with job.open() as scope:
        assert scope.leads
        assert time.monotonic() - began < 2.0  # and not as long as one waits for a hub that may be busy
        job.join(scope)
