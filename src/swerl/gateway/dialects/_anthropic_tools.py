"""The tools of an Anthropic Messages request: those on offer, and those that messages bring.

The tools on offer stand in front of the conversation. Later ones (deferred tools that are loaded,
and tools that a system message adds) are told where they come, so that what was said before stays
as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swerl.core.chat import Json, Tool
from swerl.gateway.dialects._wire import checked, optional, refuse, required, shown


class Tools:
    """The tools of one request, as its messages are read."""

    def __init__(self, items: Sequence[Json]) -> None:
        """Read the request's list. Raises GatewayError on a tool that nobody could run here."""
        self._offered: dict[str, Tool] = {}
        self._deferred: dict[str, Tool] = {}
        self._late: dict[str, Tool] = {}
        for number, item in enumerate(items):
            where = f"tools.{number}"
            fields = checked(item, dict, where)
            tool = _tool(fields, where)
            if tool.name in self._offered or tool.name in self._deferred:
                refuse(where, f"tool names must be unique, and {tool.name!r} comes twice")
            is_deferred = fields.get("defer_loading") is True
            (self._deferred if is_deferred else self._offered)[tool.name] = tool

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Tools that the model can call from the beginning."""
        return tuple(self._offered.values())

    @property
    def late(self) -> tuple[Tool, ...]:
        """Tools that the messages read so far brought."""
        return tuple(self._late.values())

    def load(self, name: str) -> str:
        """Load a deferred tool and return what the model is told."""
        tool = self._deferred.get(name)
        if tool is None:
            return f"[tool {name} is loaded]"
        return self._tell(tool)

    def change(self, block: Mapping[str, Json], where: str) -> str:
        """Read a `tool_addition` or `tool_removal` and return what the model is told."""
        place = f"{where}.tool"
        named = required(block, "tool", dict, where)
        match required(named, "type", str, place):
            case "tool_reference":
                name = required(named, "name", str, place)
                if block["type"] == "tool_addition":
                    return self.load(name)
                return f"[tool {name} can be called no more]"
            case "tool_definition":
                defined = required(named, "definition", dict, place)
                return self._tell(_tool(defined, f"{place}.definition"))
            case kind:
                refuse(place, f"{kind!r} needs the vendor's servers, and nobody runs it here")

    def _tell(self, tool: Tool) -> str:
        self._late[tool.name] = tool
        told: Json = {
            "name": tool.name,
            "description": tool.description,
            "input_schema": dict(tool.parameters),
        }
        return f"[tool {tool.name} can be called: {shown(told, f'tool {tool.name}')}]"


def _tool(fields: Mapping[str, Json], where: str) -> Tool:
    kind = optional(fields, "type", str, where) or "custom"
    if kind != "custom" and "input_schema" not in fields:
        problem = (
            f"{kind!r} needs the vendor's servers or models; offer a tool with an input_schema"
        )
        refuse(where, problem)
    return Tool(
        required(fields, "name", str, where),
        optional(fields, "description", str, where) or "",
        required(fields, "input_schema", dict, where),
    )
