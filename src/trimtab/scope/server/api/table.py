"""All endpoints, and the one that describes them."""

from __future__ import annotations

from typing import Any, Final

from trimtab.scope.server.api import compare, disturb, export, frames, job, runs, series, session
from trimtab.scope.server.endpoint import Call, Endpoint
from trimtab.scope.server.openapi import describe
from trimtab.scope.server.schema import FREE
from trimtab.scope.server.service import Service


def _describe(service: Service, call: Call) -> dict[str, Any]:
    del service, call
    return describe(ENDPOINTS)


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint("GET", "/openapi.json", "openapi", "This description.", _describe, FREE, tag="session"),
    *session.ENDPOINTS,
    *job.ENDPOINTS,
    *disturb.ENDPOINTS,
    *runs.ENDPOINTS,
    *series.ENDPOINTS,
    *frames.ENDPOINTS,
    *compare.ENDPOINTS,
    *export.ENDPOINTS,
)
