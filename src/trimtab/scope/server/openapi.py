"""The description of the API, OpenAPI 3.1, from the table that the routes are made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from trimtab import __version__
from trimtab.scope.server.answers import JSON
from trimtab.scope.server.endpoint import Endpoint, Parameter
from trimtab.scope.server.guard import CONTROL_HEADER, CSRF_HEADER
from trimtab.scope.server.schema import ERROR

ROOT: Final = "/api/v1"
_REASONS: Final = {
    "400": "Something in the request makes no sense.",
    "401": "No token, a wrong one, or one that is no longer good.",
    "403": "Not allowed: no second token, another origin, or a header is missing.",
    "404": "There is no such thing.",
    "409": "The job refuses.",
    "413": "Too long, or the answer would be.",
    "429": "Too many requests; Retry-After says when to try again.",
    "503": "There is no running job behind this server, or none now.",
}


def describe(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(ROOT + endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    paths[f"{ROOT}/live"] = {"get": _LIVE}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "trimtab scope",
            "version": __version__,
            "summary": "See what happens inside a model that trains, and disturb it.",
            "description": "docs/scope-server.md has the threat model, the WebSocket and the layout of frames.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": {"Error": ERROR}, "securitySchemes": _SCHEMES},
        "security": [{"cookie": []}, {"bearer": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    said: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": [_parameter(one) for one in endpoint.parameters],
        "responses": {str(endpoint.status): _answer(endpoint)} | _errors(endpoint),
    }
    if endpoint.method != "GET":
        said["parameters"].append(
            {"name": CSRF_HEADER, "in": "header", "required": True, "schema": {"type": "string"}, "example": "1"}
        )
    if endpoint.body is not None:
        said["requestBody"] = {"required": True, "content": {JSON: {"schema": endpoint.body}}}
    if endpoint.access == "open":
        said["security"] = []
    elif endpoint.access == "control":
        said["security"] = [{"cookie": []}, {"bearer": [], "control": []}]
    return said


def _parameter(one: Parameter) -> dict[str, Any]:
    schema = one.schema if one.default is None else one.schema | {"default": one.default}
    return {"name": one.name, "in": one.where, "required": one.required, "schema": schema}


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for media in endpoint.media:
        content[media] = {"schema": endpoint.answer if media == JSON else {"type": "string", "format": "binary"}}
    return {"description": endpoint.summary, "content": content}


def _errors(endpoint: Endpoint) -> dict[str, Any]:
    codes = [code for code in _REASONS if code not in _unlikely(endpoint)]
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {code: {"description": _REASONS[code], "content": error} for code in codes}


def _unlikely(endpoint: Endpoint) -> tuple[str, ...]:
    if endpoint.access == "open":
        return ("401", "403", "404", "409", "413", "503")
    return () if endpoint.method != "GET" else ("403", "409")


_SCHEMES: Final = {
    "cookie": {
        "type": "apiKey",
        "in": "cookie",
        "name": "trimtab-scope-PORT",
        "description": "Set by opening the link that the server printed.",
    },
    "bearer": {"type": "http", "scheme": "bearer", "description": "The token of the link, for programs."},
    "control": {
        "type": "apiKey",
        "in": "header",
        "name": CONTROL_HEADER,
        "description": "The second token, for programs; a browser exchanges it at /api/v1/control.",
    },
}
_LIVE: Final = {
    "operationId": "live",
    "summary": "A WebSocket: frames and notices as they come.",
    "tags": ["live"],
    "parameters": [],
    "responses": {
        "101": {"description": "The WebSocket is open."},
        "401": {"description": _REASONS["401"], "content": {JSON: {"schema": ERROR}}},
        "403": {"description": _REASONS["403"], "content": {JSON: {"schema": ERROR}}},
        "429": {"description": _REASONS["429"], "content": {JSON: {"schema": ERROR}}},
    },
}
