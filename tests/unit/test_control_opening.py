"""The secret, the rendezvous, and the way from the configuration to a hub and its clients."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from control_wires import SECRET

from trimtab.config import ControlConfig, load
from trimtab.control.endpoint import Endpoint, Inbox
from trimtab.control.hub import Hub
from trimtab.control.messages import Message
from trimtab.control.opening import find_hub, join, meet, open_hub
from trimtab.control.rendezvous import (
    RENDEZVOUS_FILE,
    Lookout,
    Rendezvous,
    read_rendezvous,
    remove_rendezvous,
    write_rendezvous,
)
from trimtab.control.secret import ENVIRONMENT_NAME, SECRET_FILE, find_secret, make_secret
from trimtab.control.sockets import parse_address, show_address

SOON = 20.0
TCP = ControlConfig(transport="tcp")


def test_a_secret_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    secret, made = make_secret({}, "", tmp_path)
    assert made is not None
    assert made == tmp_path / SECRET_FILE
    assert made.stat().st_mode & 0o777 == 0o600
    assert len(secret) == 64
    assert make_secret({}, "", tmp_path) == (secret, None)
    assert find_secret({}, "", tmp_path) == secret
    assert find_secret({}, "", tmp_path / "elsewhere") is None


def test_the_environment_comes_first_and_then_the_named_file(tmp_path: Path) -> None:
    named = tmp_path / "deep" / "secret"
    secret, made = make_secret({}, str(named), tmp_path)
    assert made == named
    assert find_secret({}, str(named), tmp_path) == secret
    assert find_secret({ENVIRONMENT_NAME: " the secret of the environment\n"}, str(named), tmp_path) == (
        b"the secret of the environment"
    )
    assert find_secret({}, str(tmp_path / "none"), tmp_path) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o620])
def test_a_secret_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    _, made = make_secret({}, "", tmp_path)
    assert made is not None
    made.chmod(mode)
    with pytest.raises(ValueError, match="chmod 600"):
        find_secret({}, "", tmp_path)


def test_what_is_no_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="too short"):
        find_secret({}, str(path), tmp_path)
    with pytest.raises(ValueError, match="too short"):
        find_secret({ENVIRONMENT_NAME: "short"}, "", tmp_path)
    path.write_bytes(b"x" * 10_000)
    with pytest.raises(ValueError, match="longer than"):
        find_secret({}, str(path), tmp_path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ValueError, match="cannot read the secret"):
        find_secret({}, str(link), tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="a file of your own"):
        find_secret({}, str(tmp_path / "pipe"), tmp_path)


def test_where_the_run_directory_keeps_nothing_private_the_state_directory_does(tmp_path: Path) -> None:
    run = tmp_path / "file"
    run.write_text("no directory")
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with pytest.raises(ValueError, match="cannot read the secret"):
        make_secret(environment, "", run)
    secret, made = make_secret(environment, "", tmp_path / "run")
    assert made is not None
    assert made == tmp_path / "run" / SECRET_FILE
    made.rename(tmp_path / "state-secret")
    (tmp_path / "state" / "trimtab").mkdir(parents=True)
    (tmp_path / "state-secret").rename(tmp_path / "state" / "trimtab" / SECRET_FILE)
    assert find_secret(environment, "", tmp_path / "run") == secret


def test_no_setting_holds_a_secret() -> None:
    assert load(None, {ENVIRONMENT_NAME: "x" * 40}).problems == ()
    assert load(None, {}, ["control.secret=x"]).problems != ()
    assert not hasattr(ControlConfig(), "secret")


RENDEZVOUS = Rendezvous("node1", ("127.0.0.1:4000", "10.0.0.1:4000", "[fe80::1]:4000"), "", "ab" * 16)


def test_the_rendezvous_is_believed_if_its_writer_knew_the_secret(tmp_path: Path) -> None:
    assert read_rendezvous(tmp_path, SECRET) is None
    path = write_rendezvous(tmp_path, RENDEZVOUS, SECRET)
    assert read_rendezvous(tmp_path, SECRET) == RENDEZVOUS
    assert SECRET.decode() not in path.read_text()
    with pytest.raises(ValueError, match="does not know the secret"):
        read_rendezvous(tmp_path, b"another secret, not ours")
    changed = json.loads(path.read_text()) | {"addresses": ["10.6.6.6:1"]}
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="does not know the secret"):
        read_rendezvous(tmp_path, SECRET)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b'{"version": 7}', b"[" * 3000, b"\xff\xfe", b"x" * 5000, b'{"version": 1, "proof": 7}'],
)
def test_other_files_in_its_place_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RENDEZVOUS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=RENDEZVOUS_FILE) as caught:
        read_rendezvous(tmp_path, SECRET)
    assert "\n" not in str(caught.value)


def test_addresses_on_loopback_are_for_their_own_host() -> None:
    assert [host for host, _ in RENDEZVOUS.reachable("node1")] == ["127.0.0.1", "10.0.0.1", "fe80::1"]
    assert [host for host, _ in RENDEZVOUS.reachable("node2")] == ["10.0.0.1", "fe80::1"]


def test_only_its_own_rendezvous_is_removed(tmp_path: Path) -> None:
    write_rendezvous(tmp_path, RENDEZVOUS, SECRET)
    remove_rendezvous(tmp_path, "cd" * 16, SECRET)
    assert read_rendezvous(tmp_path, SECRET) == RENDEZVOUS
    remove_rendezvous(tmp_path, RENDEZVOUS.token, SECRET)
    assert list(tmp_path.iterdir()) == []


def test_the_lookout_reports_each_change_once(tmp_path: Path) -> None:
    lookout = Lookout(tmp_path)
    assert not lookout.changed()
    write_rendezvous(tmp_path, RENDEZVOUS, SECRET)
    assert [lookout.changed(), lookout.changed()] == [True, False]
    write_rendezvous(tmp_path, RENDEZVOUS, SECRET)
    assert lookout.changed()
    remove_rendezvous(tmp_path, RENDEZVOUS.token, SECRET)
    assert not lookout.changed()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("node1:80", ("node1", 80)), ("0.0.0.0", ("0.0.0.0", 0)), ("[::1]:9", ("::1", 9)), ("::1", ("::1", 0))],
)
def test_addresses_are_read_and_shown(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert parse_address(show_address(*expected)) == expected


@pytest.mark.parametrize("text", ["", ":80", "host:", "host:x", "host:70000", "[::1", "[::1]x", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    if text == "host:":
        assert parse_address(text) == ("host", 0)
        return
    with pytest.raises(ValueError, match="not an address"):
        parse_address(text)


@pytest.mark.parametrize("transport", ["tcp", "directory", "auto"])
def test_a_hub_is_found_and_leaves_nothing(tmp_path: Path, transport: str) -> None:
    config = ControlConfig(transport=transport, poll_seconds=0.1)  # pyright: ignore[reportArgumentType]
    assert find_hub(config, tmp_path, {}) is None
    inbox = Inbox()
    with open_hub(config, tmp_path, {}) as hub:
        hub.subscribe("summary", inbox.put)
        client = join("rank.0", config, tmp_path, {})
        assert client.wait_connected(SOON)
        client.publish("summary", b"here")
        assert inbox.take(SOON) == [Message("summary", "rank.0", b"here")]
        client.close()
    assert list(tmp_path.iterdir()) == []


def test_a_hub_is_prepared_before_anybody_can_find_it(tmp_path: Path) -> None:
    config = ControlConfig(transport="tcp")
    found: list[object] = []

    def prepare(endpoint: Endpoint) -> None:
        found.append(endpoint)
        assert find_hub(config, tmp_path, {}) is None

    with open_hub(config, tmp_path, {}, prepare) as hub, meet("watch.1", config, tmp_path, {}, found.append) as client:
        assert found == [hub, client]


def test_a_secret_in_a_named_file_stays(tmp_path: Path) -> None:
    config = ControlConfig(transport="tcp", secret_file=str(tmp_path / "mine"))
    with open_hub(config, tmp_path, {}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_second_program_joins_the_hub_that_is_there(tmp_path: Path) -> None:
    config = ControlConfig(transport="tcp", poll_seconds=0.1)
    with meet("watch.1", config, tmp_path, {}) as first, meet("watch.2", config, tmp_path, {}) as second:
        assert isinstance(first, Hub)
        assert not isinstance(second, Hub)
        second.answer("ping", lambda message: message.sender.encode())
        assert first.request("watch.2", "ping").result(SOON) == b"hub"


def test_a_hub_that_died_is_replaced(tmp_path: Path) -> None:
    config = ControlConfig(transport="tcp", poll_seconds=0.1)
    dead = open_hub(config, tmp_path, {})
    dead.hub.close()  # its files stay, as after a kill
    assert find_hub(config, tmp_path, {}) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.control.opening._JOIN_SECONDS", 0.2)
        with meet("watch.1", config, tmp_path, {}) as endpoint:
            assert isinstance(endpoint, Hub)


def test_on_another_host_loopback_is_no_way_and_the_directory_is(tmp_path: Path) -> None:
    config = ControlConfig(poll_seconds=0.1)
    with open_hub(config, tmp_path, {}), pytest.MonkeyPatch.context() as patch:
        here = find_hub(config, tmp_path, {})
        assert here is not None
        assert here.addresses[0][0] == "127.0.0.1"
        patch.setattr("trimtab.control.opening.this_host", lambda: "node2")
        there = find_hub(config, tmp_path, {})
        assert there is not None
        assert there.addresses == ()
        assert there.directory == here.directory
        with pytest.raises(ValueError, match=r"listens on loopback only; set control.bind"):
            find_hub(TCP, tmp_path, {})


def test_what_cannot_be_opened_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = show_address(*taken.getsockname())
        with pytest.raises(ValueError, match="the hub cannot be opened there"):
            open_hub(ControlConfig(transport="tcp", bind=address), tmp_path, {})
    with pytest.raises(ValueError, match="not an address"):
        open_hub(ControlConfig(transport="tcp", bind="host:x"), tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_an_address_without_a_secret_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no secret"):
        find_hub(ControlConfig(address="node1:4000"), tmp_path, {})
    offer = find_hub(ControlConfig(address="node1:4000"), tmp_path, {ENVIRONMENT_NAME: "x" * 32})
    assert offer is not None
    assert offer.addresses == (("node1", 4000),)


@pytest.mark.parametrize(
    "setting",
    ["poll_seconds=0.01", "heartbeat_seconds=0", "message_kb=0", "message_kb=100000", "connections=0", "transport=udp"],
)
def test_settings_that_make_no_sense_keep_their_default(setting: str) -> None:
    loaded = load(None, {}, [f"control.{setting}"])
    assert len(loaded.problems) == 1
    assert loaded.config.control == ControlConfig()
