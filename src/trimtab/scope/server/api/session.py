"""Of the session itself: what the server is and allows, and the exchange of the second token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from trimtab import __version__
from trimtab.scope.fields import Fields
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.endpoint import Call, Endpoint
from trimtab.scope.server.guard import CONTROL_HEADER
from trimtab.scope.server.schema import FREE, INTEGER, TEXT, TRUTH, Schema, listed, record, said
from trimtab.scope.server.service import Service
from trimtab.scope.server.tokens import Session

_CONTROL: Final[Schema] = record(control=TRUTH, control_seconds=said(INTEGER, "For which it may disturb."))


def _session(call: Call) -> Session:
    assert call.caller.session is not None, "who may read has a session"
    return call.caller.session


def _health(service: Service, call: Call) -> object:
    del service, call
    return {"ok": True}


def _about(service: Service, call: Call) -> object:
    session = _session(call)
    return {
        "version": __version__,
        "api": 1,
        "started_unix_ns": service.started_ns,
        "attached": service.attached,
        "directory": str(service.runs.directories()[0]),
        "allow_perturb": service.allow_perturb,
        "control": service.allow_perturb and call.caller.control,
        "control_seconds": round(service.tokens.control_left(session)),
        "session_seconds": round(service.tokens.time_left(session)),
        "epoch": service.hub.epoch,
        "live": {
            "clients": service.hub.clients,
            "frames": service.hub.heard,
            "overflowed": service.hub.overflowed,
            "slow": service.slow,
        },
        "runs": service.runs.names(),
        "limits": asdict(service.limits),
    }


def _take_control(service: Service, call: Call) -> object:
    if not service.allow_perturb:
        raise Problem(403, "this server is read-only; trimtab scope serve --allow-perturb lets it disturb")
    if call.caller.program:
        raise Problem(400, f"a program shows the control token with each request, in the header {CONTROL_HEADER}")
    body = Fields(call.body, "control")
    token = body.text("token")
    body.done()
    if not service.tokens.is_control(token):
        raise Problem(
            403, "that is not the control token; the server wrote it to scope/server-token in the run directory"
        )
    return {"control": True, "control_seconds": round(service.tokens.grant(_session(call)))}


def _leave_control(service: Service, call: Call) -> object:
    del service
    _session(call).control_until = 0.0
    return {"control": False, "control_seconds": 0}


def _leave(service: Service, call: Call) -> object:
    service.tokens.close(_session(call))
    return {"control": False, "control_seconds": 0}


ENDPOINTS: Final = (
    Endpoint(
        "GET", "/health", "health", "Is the server there?", _health, record(ok=TRUTH), access="open", tag="session"
    ),
    Endpoint(
        "GET",
        "/session",
        "session",
        "What the server is, what it allows this session, and its limits.",
        _about,
        record(
            version=TEXT,
            api=INTEGER,
            started_unix_ns=INTEGER,
            attached=said(TRUTH, "It belongs to a job."),
            directory=said(
                TEXT, "Into which that job records; of recordings the first: trimtab scope open finds it there."
            ),
            allow_perturb=TRUTH,
            control=said(TRUTH, "This session may disturb."),
            control_seconds=INTEGER,
            session_seconds=said(INTEGER, "Until a new link is needed."),
            epoch=said(TEXT, "Of the sequence numbers of the WebSocket."),
            live=record(
                clients=said(INTEGER, "Open WebSockets."),
                frames=said(INTEGER, "That came from the job."),
                overflowed=said(INTEGER, "Of these, those that came faster than they could be passed on."),
                slow=said(INTEGER, "WebSockets that were cut as they took nothing."),
            ),
            runs=listed(TEXT),
            limits=FREE,
        ),
        tag="session",
    ),
    Endpoint("DELETE", "/session", "leave", "End this session.", _leave, _CONTROL, tag="session"),
    Endpoint(
        "POST",
        "/control",
        "takeControl",
        "Show the second token: this session may disturb for a while.",
        _take_control,
        _CONTROL,
        body=record(token=TEXT),
        tag="session",
    ),
    Endpoint(
        "DELETE",
        "/control",
        "leaveControl",
        "This session may disturb no more.",
        _leave_control,
        _CONTROL,
        tag="session",
    ),
)
