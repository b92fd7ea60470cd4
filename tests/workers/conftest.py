import pytest

from grpo_dist.workers.scorer import RewardSettings
from tests.workers.local_reward import SCORER, Local


@pytest.fixture(scope="module")
def worker(local_ray: None, random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Local:
    file = tmp_path_factory.mktemp("scorer") / "scorer.py"
    file.write_text(SCORER)
    worker = Local()
    worker.start(
        RewardSettings(random_models["tied"], False, str(file), "compute_score", {"bonus": 10}, failure_score=-0.5)
    )
    return worker
