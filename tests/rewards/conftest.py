import threading
from collections.abc import Iterator

import pytest

from tests.rewards.http_service import Service


@pytest.fixture
def service() -> Iterator[Service]:
    """A running HTTP service."""
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)
