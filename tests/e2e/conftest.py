"""What whole runs in the tests' own process share."""

import signal
from collections.abc import Iterator

import pytest

from grpo_dist.run import training


@pytest.fixture(scope="module")
def shared_ray(local_ray: None) -> Iterator[None]:
    """The runs join the cluster that is there, and leave it as it is."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "connect", lambda *address: "joined the cluster of the tests")
        patch.setattr(training, "_disconnect", lambda *given: None)
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
