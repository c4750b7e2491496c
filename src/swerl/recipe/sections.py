"""The kinds of sections in a recipe: plain ones, plug-ins, and one of several agents."""

from __future__ import annotations

from math import isfinite
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from swerl.core import plugins

ONE, SEVERAL = "[harness]", "[[harness]]"
"""Ways to write the agents: one table, or a list of tables with weights."""
INITIAL_MODEL = "initial_model"
"""Folder in a run's folder with the model that the run made."""


def require_plain(model: type[BaseModel], key: str, value: Any) -> None:
    """Raise ValueError if a key's number is infinite, or true or false is given for a number."""
    if isinstance(value, float) and not isfinite(value):
        raise ValueError("must be a finite number")
    field = model.model_fields.get(key)
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    if isinstance(value, bool) and {int, float} & {*kinds} and bool not in kinds:
        raise ValueError("must be a number")


class Section(BaseModel):
    """A part of a recipe: frozen; an unknown key, and an infinite number, is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain(cls, value: Any, info: ValidationInfo) -> Any:
        require_plain(cls, str(info.field_name), value)
        return value


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
