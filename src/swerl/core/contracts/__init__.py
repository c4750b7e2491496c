"""Every contract between swerl's parts, by side; a plug-in implements one of these."""

from __future__ import annotations

from swerl.core.contracts.agents import Dialect, Endpoint, Exit, Harness, WireReply
from swerl.core.contracts.data import Converter
from swerl.core.contracts.learning import Algorithm, Fresh, Grader, Trainer
from swerl.core.contracts.models import (
    ChatEngine,
    ColocatedEngine,
    Engine,
    EngineAddress,
    EngineSetup,
    Family,
    MegatronMapping,
    ParserChoice,
    SharedEngine,
    StreamedEngine,
    WeightSource,
)
from swerl.core.contracts.sandboxes import (
    Listener,
    MeteredSandbox,
    Process,
    Sandbox,
    SandboxBackend,
)

__all__ = [
    "Algorithm",
    "ChatEngine",
    "ColocatedEngine",
    "Converter",
    "Dialect",
    "Endpoint",
    "Engine",
    "EngineAddress",
    "EngineSetup",
    "Exit",
    "Family",
    "Fresh",
    "Grader",
    "Harness",
    "Listener",
    "MegatronMapping",
    "MeteredSandbox",
    "ParserChoice",
    "Process",
    "Sandbox",
    "SandboxBackend",
    "SharedEngine",
    "StreamedEngine",
    "Trainer",
    "WeightSource",
    "WireReply",
]
