"""Every contract between swerl's parts, by side; a plug-in implements one of these."""

from __future__ import annotations

from swerl.interfaces.agents import (
    Dialect,
    Endpoint,
    Exit,
    Harness,
    WireReply,
)
from swerl.interfaces.data import (
    Converter,
)
from swerl.interfaces.learning import (
    Algorithm,
    Fresh,
    Grader,
    Trainer,
)
from swerl.interfaces.models import (
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
from swerl.interfaces.sandboxes import (
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
