import pickle

import pytest

from grpo_dist.errors import (
    AgentError,
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    DataLost,
    DiskError,
    GrpoDistError,
    HealthError,
    OutOfMemory,
    RayLost,
    RewardError,
    TrainingDiverged,
    WorkerError,
    WorkerLost,
)


@pytest.mark.parametrize(
    ("error", "parents", "exit_code"),
    [
        (ConfigError, (GrpoDistError, ValueError), 2),
        (DataError, (ConfigError,), 2),
        (BatchError, (GrpoDistError, ValueError), 1),
        (RewardError, (GrpoDistError,), 1),
        (AgentError, (GrpoDistError,), 1),
        (TrainingDiverged, (GrpoDistError,), 1),
        (HealthError, (GrpoDistError,), 1),
        (CheckpointError, (GrpoDistError,), 1),
        (DiskError, (GrpoDistError,), 1),
        (RayLost, (GrpoDistError,), 3),
        (DataLost, (GrpoDistError,), 1),
        (WorkerError, (GrpoDistError,), 1),
        (WorkerLost, (WorkerError,), 1),
        (OutOfMemory, (WorkerError,), 1),
    ],
)
def test_tree_and_exit_codes(error: type[GrpoDistError], parents: tuple[type, ...], exit_code: int) -> None:
    assert issubclass(error, parents)
    assert error.exit_code == exit_code
    assert issubclass(error, ConfigError) == (exit_code == 2), "exit code 2 is for what the user can mend, only"


def test_worker_error_survives_the_way_between_processes() -> None:
    error = WorkerError("it broke", "actor", 3, "host7", "update", "Traceback ...")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is WorkerError
    assert vars(copy) == vars(error)
    assert str(copy) == "actor worker 3 on host7, stage 'update': it broke"


def test_worker_error_without_details() -> None:
    assert str(WorkerError("it broke")) == "? worker -1 on ?, stage '?': it broke"
