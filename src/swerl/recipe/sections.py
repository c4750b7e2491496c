"""The kinds of sections in a recipe: plain ones, plug-ins, and one of several agents."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from swerl.core import plugins

ONE, SEVERAL = "[harness]", "[[harness]]"
"""Ways to write the agents: one table, or a list of tables with weights."""
INITIAL_MODEL = "initial_model"
"""Folder in a run's folder with the model that the run made."""


class Section(BaseModel):
    """A part of a recipe: frozen; an unknown key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PluginSection(BaseModel):
    """A section whose `type` names a plug-in; the plug-in's own `Options` validate the rest."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    """Name of the plug-in."""

    @property
    def options(self) -> dict[str, Any]:
        """The settings besides `type`."""
        return dict(self.model_extra or {})

    @property
    def title(self) -> str:
        """The name in Episodes and reports: `type` without a folder."""
        return plugins.short(self.type)


class AgentSection(PluginSection):
    """One of several agents, as a table of `[[harness]]`; the agent's own keys follow these."""

    name: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    """Name in Episodes, metrics and evaluations. Empty: that of `type`."""
    weight: float = Field(1.0, gt=0)
    """Share of the training Groups, relative to the other agents. Each Group has one agent."""
    held_out: bool = False
    """Train on no Group of this agent, and only evaluate it: the result shows what carries over to
    an agent that training has not seen."""

    @property
    def title(self) -> str:
        return self.name or super().title
