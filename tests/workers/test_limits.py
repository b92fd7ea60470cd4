from grpo_dist.workers.limits import TimeLimits


def test_a_stage_has_its_own_limit_or_the_default() -> None:
    limits = TimeLimits(1800.0, {"generate": 7.0})
    assert (limits.of("generate"), limits.of("update")) == (7.0, 1800.0)
