"""Who is let in, and what is kept out: tokens, cookies, hosts, origins, sizes, rates, headers."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from scope_server_parts import BASE, COOKIE, CSRF, Site, record, site
from starlette.testclient import WebSocketDenialResponse

from trimtab.scope.server.limits import Limits, Rate
from trimtab.scope.server.runs import Runs

LIVE = "ws://127.0.0.1:8000/api/v1/live"


@pytest.fixture
def door(tmp_path: Path) -> Generator[Site]:
    with site(tmp_path, bearer=False) as found:
        yield found


def enter(door: Site) -> None:
    """As a browser does."""
    answer = door.client.get("/", params={"token": door.service.tokens.link, "tap": "a&b"})
    assert answer.status_code == 303


def denied(door: Site, **headers: str) -> int:
    """Status with which a WebSocket is refused."""
    with pytest.raises(WebSocketDenialResponse) as refusal, door.client.websocket_connect(LIVE, headers=headers):
        pass
    assert refusal.value.headers["X-Content-Type-Options"] == "nosniff"
    return refusal.value.status_code


def test_the_token_of_the_link_becomes_a_cookie_and_leaves_the_address(door: Site) -> None:
    answer = door.client.get("/", params={"token": door.service.tokens.link, "tap": "a&b"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/?tap=a%26b"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert door.service.tokens.link not in cookie
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert door.client.get("/api/v1/session").status_code == 200


def test_without_a_token_nothing_is_said(door: Site) -> None:
    for path in ("/session", "/runs", "/status", "/openapi.json"):
        answer = door.client.get(f"/api/v1{path}")
        assert answer.status_code == 401
        assert list(answer.json()) == ["error"]
    assert denied(door, Origin=BASE) == 401
    assert door.client.get("/api/v1/health").json() == {"ok": True}


@pytest.mark.parametrize("token", ["", "x", "é", "x" * 5000])
def test_wrong_tokens_open_nothing(door: Site, token: str) -> None:
    answer = door.client.get("/", params={"token": token})
    assert answer.status_code in (403, 414)
    assert "set-cookie" not in answer.headers
    assert door.client.get("/api/v1/runs", headers={"Authorization": f"Bearer {token}".encode()}).status_code == 401
    assert door.client.get("/api/v1/runs", headers={"Authorization": "Basic eDp5"}).status_code == 401
    door.client.cookies.set(COOKIE, "nonsense")
    assert door.client.get("/api/v1/runs").status_code == 401


def test_links_and_sessions_end(door: Site) -> None:
    enter(door)
    first = door.service.tokens.link
    door.clock.now += 11.9 * 3600
    assert door.client.get("/api/v1/session").json()["session_seconds"] == 360
    door.clock.now += 400
    assert door.client.get("/api/v1/session").status_code == 401
    door.clock.now += 84 * 3600
    assert door.service.tokens.renew()
    assert door.service.tokens.is_link(first)
    door.clock.now += 84 * 3600
    assert not door.service.tokens.is_link(first)
    assert door.client.get("/", params={"token": first}).status_code == 403
    assert door.client.get("/", params={"token": door.service.tokens.link}).status_code == 303


def test_a_session_can_be_left(door: Site) -> None:
    enter(door)
    assert door.client.delete("/api/v1/session", headers=CSRF).status_code == 200
    assert door.client.get("/api/v1/session").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8000", "", "a@127.0.0.1", "[::1"]
)
def test_other_hosts_are_not_answered(door: Site, host: str) -> None:
    """DNS rebinding: the page's own name points here."""
    enter(door)
    assert door.client.get("/api/v1/session", headers={"Host": host}).status_code == 421
    assert door.client.get("/", headers={"Host": host}).status_code == 421
    assert denied(door, Host=host, Origin=f"http://{host}") == 421


@pytest.mark.parametrize(
    "host", ["localhost:9999", "127.0.0.1", "[::1]:8000", "LOCALHOST.", "scope.lan", "scope.lan:443"]
)
def test_its_own_names_are(tmp_path: Path, host: str) -> None:
    with site(tmp_path, bearer=False, hosts=("scope.lan",)) as door:
        assert door.client.get("/api/v1/health", headers={"Host": host}).status_code == 200


def test_the_address_that_was_connected_to_is_its_own(door: Site) -> None:
    """An address cannot be rebound, so one may bind to 0.0.0.0 and use any address of the host."""
    client = type(door.client)(door.app, base_url="http://10.1.2.3:8000")
    assert client.get("/api/v1/health").status_code == 200
    assert client.get("/api/v1/health", headers={"Host": "10.1.2.4:8000"}).status_code == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8001", "ftp://127.0.0.1:8000", ""])
def test_other_origins_change_nothing_and_hear_nothing(door: Site, origin: str) -> None:
    enter(door)
    headers = {**CSRF, "Origin": origin}
    assert door.client.delete("/api/v1/session", headers=headers).status_code == 403
    assert denied(door, Origin=origin) == 403
    assert door.client.get("/api/v1/session").status_code == 200, "it has not been ended"


def test_a_browser_that_says_cross_site_is_believed(door: Site) -> None:
    enter(door)
    headers = {**CSRF, "Sec-Fetch-Site": "same-site"}
    assert door.client.delete("/api/v1/session", headers=headers).status_code == 403
    assert denied(door, Origin=BASE, **{"Sec-Fetch-Site": "cross-site"}) == 403


def test_a_socket_with_a_cookie_needs_an_origin_and_one_with_the_token_does_not(door: Site) -> None:
    enter(door)
    assert denied(door) == 403
    with door.client.websocket_connect(LIVE, headers={"Origin": BASE}) as socket:
        assert socket.receive_json()["type"] == "hello"
    door.client.cookies.clear()
    with door.client.websocket_connect(LIVE, headers={"Authorization": f"Bearer {door.service.tokens.link}"}) as socket:
        assert socket.receive_json()["type"] == "hello"


def test_what_changes_something_needs_the_header_that_no_form_can_send(door: Site) -> None:
    enter(door)
    for method, path in (("POST", "/subscriptions"), ("DELETE", "/session"), ("POST", "/control"), ("PUT", "/runs")):
        answer = door.client.request(method, f"/api/v1{path}", headers={"Origin": BASE})
        assert answer.status_code == 403
        assert "x-trimtab" in answer.json()["error"]


def test_bodies_are_json_and_bounded(tmp_path: Path) -> None:
    with site(tmp_path, limits=Limits(body_bytes=1000)) as door:
        url, headers = "/api/v1/subscriptions", {**door.headers, **CSRF}
        assert door.client.post(url, content=b"token=1", headers=headers).status_code == 415
        headers["Content-Type"] = "application/json"
        assert door.client.post(url, content=b"x" * 1001, headers=headers).status_code == 413
        assert door.client.post(url, content=(b"x" * 600 for _ in range(2)), headers=headers).status_code == 413
        for wrong in (b"{", b"\xff", b"[" * 100, b'{"token": NaN}', b""):
            answer = door.client.post(url, content=wrong, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"].startswith("JSON")
        assert door.client.get("/api/v1/runs", params={"x": "y" * 5000}, headers=door.headers).status_code == 414
        wrong = {**headers, "Content-Length": "-1"}
        assert door.client.post(url, content=b"{}", headers=wrong).status_code == 413


def test_rates_are_limited_for_each_client(tmp_path: Path) -> None:
    limits = Limits(reads=Rate(10.0, 5), strangers=Rate(1.0, 3))
    with site(tmp_path, bearer=False, limits=limits) as door:
        enter(door)
        codes = [door.client.get("/api/v1/health").status_code for _ in range(7)]
        assert codes == [200] * 5 + [429] * 2
        other = type(door.client)(door.app, base_url=BASE, client=("10.0.0.9", 1))
        assert [other.get("/").status_code for _ in range(4)] == [200] * 3 + [429]
        refused = door.client.get("/api/v1/health")
        assert int(refused.headers["retry-after"]) >= 1
        door.clock.now += 1.0
        assert door.client.get("/api/v1/health").status_code == 200


def test_guessing_is_slow(tmp_path: Path) -> None:
    with site(tmp_path, bearer=False, limits=Limits(strangers=Rate(1.0, 4))) as door:
        codes = [
            door.client.get("/api/v1/runs", headers={"Authorization": f"Bearer {guess}"}).status_code
            for guess in range(6)
        ]
        assert codes == [401] * 4 + [429] * 2


def test_every_answer_has_the_headers_that_keep_a_browser_safe(door: Site) -> None:
    enter(door)
    for path in ("/", "/api/v1/session", "/api/v1/nothing", "/nothing", "/plain.js", "/?token=wrong"):
        headers = door.client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
    assert door.client.get("/api/v1/session").headers["cache-control"] == "no-store"


def test_static_files_are_cached_as_long_as_their_names_say(door: Site) -> None:
    answer = door.client.get("/")
    assert answer.headers["cache-control"] == "no-cache"
    again = door.client.get("/", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "<script>" not in answer.text, "scripts stand in files of their own, or the policy would keep them out"
    assert 'style="' not in answer.text


def asked(door: Site, path: str, **headers: str) -> int:
    """Status of a request for exactly this path, which a client would tidy up."""
    sent: list[Any] = []

    async def ask() -> None:
        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        named = [(name.lower().encode(), value.encode()) for name, value in {"host": "127.0.0.1", **headers}.items()]
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": named}
        await door.app(scope, receive, send)

    assert door.client.portal is not None
    door.client.portal.call(ask)
    return sent[0]["status"]


@pytest.mark.parametrize(
    "path", ["/../api.py", "/../server.json", "/./index.html", "//etc/passwd", "/index.html\0", "/.", "/.."]
)
def test_no_path_leads_out_of_the_static_files(door: Site, path: str) -> None:
    assert asked(door, path) == 404


def test_no_run_is_found_by_a_path(tmp_path: Path) -> None:
    record(tmp_path / "other", steps=1)
    (tmp_path / "run").mkdir()
    with site(tmp_path / "run") as door:
        for name in ("..", "../other", "%2e%2e%2fother", "/etc", "other", "run/../../other", ""):
            assert asked(door, f"/api/v1/runs/{name}/taps", **door.headers) == 404


def test_links_out_of_a_run_directory_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    record(secret, steps=1)
    (secret / "report.json").write_text('{"verdict": "secret"}')
    run = tmp_path / "run"
    (run / "scope").mkdir(parents=True)
    (run / "report.json").symlink_to(secret / "report.json")
    chunk = next((secret / "scope").glob("*.ttscope"))
    (run / "scope" / chunk.name).symlink_to(chunk)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "scope").symlink_to(secret / "scope")
    os.mkfifo(tmp_path / "linked" / "report.json")
    with site(run, linked) as door:
        for name in ("run", "linked"):
            assert "link" in door.get(f"/runs/{name}")["error"]
            assert door.refused(f"/runs/{name}/taps")[0] == 422
            assert door.refused(f"/runs/{name}/report")[0] == 404
            assert door.refused(f"/runs/{name}/audit")[0] == 404


def test_errors_are_one_line_without_a_trace(door: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(door)

    def broken(_: Runs) -> list[str]:
        raise RuntimeError("the inside\nof the server")

    monkeypatch.setattr(Runs, "names", broken)
    client = type(door.client)(door.app, base_url=BASE, raise_server_exceptions=False, cookies=door.client.cookies)
    answer = client.get("/api/v1/runs")
    assert answer.status_code == 500
    assert json.loads(answer.text)["error"].startswith("the server failed (RuntimeError)")
    assert "inside" not in answer.text
    assert "Traceback" not in answer.text
    for method in ("PATCH", "PUT", "TRACE"):
        refused = client.request(method, "/api/v1/runs", headers=CSRF)
        assert (refused.status_code, refused.json()) == (405, {"error": "not with that method"})


def test_read_only_unless_it_is_allowed_and_the_second_token_was_shown(tmp_path: Path) -> None:
    body = {"pattern": "layers.0.output", "kind": "zero"}
    paths = ("/perturbations", "/perturbations/preview", "/pairs", "/probes", "/perturbations/p-1/expire")
    with site(tmp_path) as door:
        for path in paths:
            assert door.post(path, body, **{"X-Trimtab-Control": door.service.tokens.control}).status_code == 403
        assert door.post("/control", {"token": door.service.tokens.control}).status_code == 403
    with site(tmp_path, allow_perturb=True) as door:
        for path in paths:
            assert door.post(path, body).status_code == 403
            assert door.post(path, body, **{"X-Trimtab-Control": door.service.tokens.link}).status_code == 403
            shown = door.post(path, body, **{"X-Trimtab-Control": door.service.tokens.control})
            assert shown.status_code in (400, 503), "it is let in; there is no job here"
        assert door.post("/control", {"token": door.service.tokens.control}).status_code == 400


def test_a_browser_exchanges_the_second_token_for_a_while(tmp_path: Path) -> None:
    with site(tmp_path, allow_perturb=True, bearer=False) as door:
        enter(door)
        body = {"pattern": "layers.0.output", "kind": "zero"}
        assert door.post("/control", {"token": door.service.tokens.link}).status_code == 403
        assert not door.get("/session")["control"]
        assert door.post("/control", {"token": door.service.tokens.control}).json()["control_seconds"] == 3600
        assert door.get("/session")["control"]
        assert door.post("/perturbations/preview", body).status_code == 503
        door.clock.now += 3601
        assert door.post("/perturbations/preview", body).status_code == 403
        assert door.post("/control", {"token": door.service.tokens.control}).status_code == 200
        assert door.post("/control", method="DELETE").json() == {"control": False, "control_seconds": 0}
        assert door.post("/perturbations/preview", body).status_code == 403
        other = type(door.client)(door.app, base_url=BASE)
        other.get("/", params={"token": door.service.tokens.link}, follow_redirects=False)
        assert not other.get("/api/v1/session").json()["control"], "another session has not shown it"
