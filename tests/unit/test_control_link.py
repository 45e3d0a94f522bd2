"""One connection: who does not know the secret gets nowhere, and nothing that was said can be said again."""

from __future__ import annotations

import pytest
from control_wires import LIMITS, SECRET, Wire, reason_of, taken
from hypothesis import given
from hypothesis import strategies as st

from trimtab.control.frames import LENGTH_BYTES, frame
from trimtab.control.handshake import ClientSide, HubSide, RefusedError, Sealer
from trimtab.control.link import HANDSHAKE_SECONDS, Limits, Link, Queue
from trimtab.control.messages import PUBLISH, REQUEST, Envelope

ONE, TWO = Envelope(PUBLISH, "summary", "", 0, b"one"), Envelope(REQUEST, "dump", "hub", 5, b"two")


def test_both_sides_prove_themselves_and_talk() -> None:
    wire = Wire()
    assert not wire.hub.established
    wire.shake()
    assert wire.hub.established
    assert wire.client.established
    assert wire.hub.peer == "rank.7"
    assert wire.hub.received(wire.to_hub(ONE, TWO), 1.0) == [ONE, TWO]
    wire.hub.send(TWO)
    assert wire.client.received(taken(wire.hub), 1.0) == [TWO]


def test_the_secret_never_travels() -> None:
    wire = Wire()
    greeting = taken(wire.hub)
    wire.client.received(greeting, 0.0)
    answer = taken(wire.client)
    wire.hub.received(answer, 0.0)
    assert SECRET not in greeting + answer + taken(wire.hub)


def test_a_client_without_the_secret_is_refused() -> None:
    wire = Wire(client_secret=b"another secret, not ours")
    wire.client.received(taken(wire.hub), 0.0)
    with pytest.raises(RefusedError, match="does not know the secret"):
        wire.hub.received(taken(wire.client), 0.0)
    assert not wire.hub.established


def test_a_hub_without_the_secret_is_refused() -> None:
    client = ClientSide(SECRET, "rank.0")
    impostor = HubSide(b"another secret, not ours")
    client.greeted(impostor.greeting)
    with pytest.raises(RefusedError, match="does not know the secret"):
        client.welcomed(bytes(32))


def test_a_proof_cannot_be_handed_on_to_another_session_or_reflected() -> None:
    answer = ClientSide(SECRET, "rank.0").greeted(HubSide(SECRET).greeting)
    with pytest.raises(RefusedError):
        HubSide(SECRET).answered(answer)  # recorded elsewhere
    victim = ClientSide(SECRET, "rank.0")
    own = victim.greeted(HubSide(SECRET).greeting)
    with pytest.raises(RefusedError):
        victim.welcomed(own[-32 - len("rank.0") : -len("rank.0")])  # its own proof


def test_the_name_is_part_of_the_proof() -> None:
    hub = HubSide(SECRET)
    answer = ClientSide(SECRET, "rank.0").greeted(hub.greeting)
    with pytest.raises(RefusedError):
        hub.answered(answer[:-1] + b"1")


def test_another_version_is_named() -> None:
    hub = HubSide(SECRET)
    older = hub.greeting[:7] + b"\x00" + hub.greeting[8:]
    with pytest.raises(RefusedError, match="speaks version 0 of the protocol, this is 1"):
        ClientSide(SECRET, "rank.0").greeted(older)
    answer = ClientSide(SECRET, "rank.0").greeted(hub.greeting)
    with pytest.raises(RefusedError, match="version 9"):
        hub.answered(answer[:7] + b"\x09" + answer[8:])


def test_a_replayed_frame_is_refused() -> None:
    wire = Wire()
    wire.shake()
    raw = wire.to_hub(ONE)
    assert wire.hub.received(raw, 0.0) == [ONE]
    with pytest.raises(ValueError, match="not authentic"):
        wire.hub.received(raw, 0.0)


def test_frames_in_another_order_and_left_out_are_refused() -> None:
    for order in ((1, 0), (1,)):
        wire = Wire()
        wire.shake()
        frames = [wire.to_hub(ONE), wire.to_hub(TWO)]
        with pytest.raises(ValueError, match="not authentic"):
            wire.hub.received(b"".join(frames[place] for place in order), 0.0)


def test_what_one_side_said_cannot_be_said_to_it() -> None:
    wire = Wire()
    wire.shake()
    with pytest.raises(ValueError, match="not authentic"):
        wire.client.received(wire.to_hub(ONE), 0.0)


@given(st.data())
def test_a_frame_that_was_changed_anywhere_is_refused(data: st.DataObject) -> None:
    wire = Wire()
    wire.shake()
    raw = bytearray(wire.to_hub(ONE))
    place = data.draw(st.integers(LENGTH_BYTES, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="not authentic"):
        wire.hub.received(bytes(raw), 0.0)


@given(st.lists(st.binary(min_size=1, max_size=400), max_size=5))
def test_garbage_from_strangers_is_refused_or_waits(pieces: list[bytes]) -> None:
    link = Link(SECRET, None, LIMITS, 0.0)
    taken(link)
    for piece in pieces:
        if reason_of(lambda piece=piece: link.received(piece, 0.0)):
            break
    assert not link.established


def test_strangers_get_small_frames_only() -> None:
    link = Link(SECRET, None, LIMITS, 0.0)
    with pytest.raises(ValueError, match="at most"):
        link.received((10_000).to_bytes(4, "big"), 0.0)
    wire = Wire(limits=Limits(body_bytes=1000))
    wire.shake()
    with pytest.raises(ValueError, match="at most"):
        wire.hub.received((1 << 31).to_bytes(4, "big"), 0.0)


def test_a_truncated_frame_waits_and_is_given_up_with_the_connection() -> None:
    wire = Wire()
    wire.shake()
    raw = wire.to_hub(ONE)
    assert wire.hub.received(raw[:-1], 0.0) == []
    assert wire.hub.received(raw[-1:], 0.0) == [ONE]
    assert wire.hub.received(frame(b"")[:3], 0.0) == []


def test_who_takes_too_long_to_prove_himself_is_cut() -> None:
    link = Link(SECRET, None, LIMITS, 0.0)
    for second in range(int(HANDSHAKE_SECONDS)):
        link.received(b"\0", float(second)) if second < 3 else None  # a byte now and then does not help
        link.tick(float(second))
    with pytest.raises(ValueError, match="no handshake within"):
        link.tick(HANDSHAKE_SECONDS + 1)


def test_heartbeats_keep_a_connection_and_their_absence_ends_it() -> None:
    wire = Wire()
    wire.shake()
    for second in range(1, 60):
        wire.client.tick(float(second))
        raw = taken(wire.client, float(second))
        assert bool(raw) == (second % 5 == 0)
        if raw:
            assert wire.hub.received(raw, float(second)) == [], "heartbeats are nobody's business"
        wire.hub.tick(float(second))
        wire.client.received(taken(wire.hub, float(second)), float(second))
    with pytest.raises(ValueError, match="not heard of for 18 s"):
        wire.hub.tick(55.0 + 18.0)


def test_the_oldest_go_where_too_many_wait() -> None:
    queue = Queue(Limits(queue=3, queue_bytes=1000))
    for number in range(5):
        queue.put(Envelope(PUBLISH, "s", "", number, b""))
    assert queue.dropped == 2
    assert [queue.get().number for _ in range(3)] == [2, 3, 4]
    for number in range(5):
        queue.put(Envelope(PUBLISH, "s", "", number, b"x" * 400))
    assert [queue.get().number for _ in range(len(queue))] == [3, 4]


def test_a_dropped_envelope_leaves_no_gap_in_what_is_authenticated() -> None:
    wire = Wire(limits=Limits(queue=2))
    wire.shake()
    many = [Envelope(PUBLISH, "s", "", number, b"") for number in range(9)]
    assert wire.hub.received(wire.to_hub(*many), 0.0) == many[-2:]


def test_tags_depend_on_the_key_and_the_count() -> None:
    one, other = Sealer(b"k" * 32), Sealer(b"K" * 32)
    first, second = one.seal(b"x"), one.seal(b"x")
    assert len({first, second, other.seal(b"x")}) == 3
