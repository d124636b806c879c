"""Reviewed JSON as text."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["to_text"]


def to_text(value: Any, indent: str = "") -> str:
    """JSON with one line for each list of numbers, so that a difference can be read."""
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {to_text(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list | str) for item in value):
        return "[\n" + ",\n".join(inner + to_text(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
