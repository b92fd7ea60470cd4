from collections.abc import Iterator

import pytest

from tests.runtime.fakes import impatient, store_here  # noqa: F401 - fixtures
from tests.workers.local_reward import SCORER, Local, local


@pytest.fixture(scope="module")
def worker(random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("scorer")
    worker = local(random_models["tied"], folder, SCORER, {"bonus": 10}, failure_score=-0.5)
    yield worker
    worker.scorer.stop()
