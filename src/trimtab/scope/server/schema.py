"""JSON Schema (draft 2020-12, as OpenAPI 3.1 has it) in fewer words."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
TRUTH: Final[Schema] = {"type": "boolean"}
ANY: Final[Schema] = {}
FREE: Final[Schema] = {"type": "object"}
"""An object with fields of which nothing is said here."""
ERROR: Final[Schema] = {
    "type": "object",
    "properties": {"error": {"type": "string", "description": "One line: what, where, what to do."}},
    "required": ["error"],
    "additionalProperties": False,
}


def said(schema: Schema, description: str) -> Schema:
    """With a description."""
    return schema | {"description": description}


def maybe(schema: Schema) -> Schema:
    """Or null."""
    kind = schema.get("type")
    return schema | {"type": [kind, "null"]} if isinstance(kind, str) else {"anyOf": [schema, {"type": "null"}]}


def listed(items: Schema, description: str = "") -> Schema:
    """A list."""
    return {"type": "array", "items": items} | ({"description": description} if description else {})


def one_of(*words: str) -> Schema:
    """One of some words."""
    return {"type": "string", "enum": list(words)}


def record(optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object with these fields and no others, of which all but ``optional`` are always there."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def mapped(values: Schema, description: str = "") -> Schema:
    """An object whose names are data."""
    found: Schema = {"type": "object", "additionalProperties": values}
    return found | ({"description": description} if description else {})
