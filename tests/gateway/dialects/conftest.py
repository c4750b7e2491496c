"""The gateway's fixtures: dialects are tested through it, with the vendors' own clients."""

from tests.gateway.conftest import engine as engine
from tests.gateway.conftest import gateway as gateway
from tests.gateway.conftest import open_session as open_session
