import pytest, dataclasses
from tests.core.test_distribution import check_spreads, divisors, INTERVALS
from tests.support.cluster import *

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")


@pytest.mark.parametrize("name", ["images", "tokens", "chain"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("world", [2, 4])
def test_all(name, optimizer, world):
    plan = Plan(sizes=even(world, 12), network=name, optimizer=optimizer, options=dict(INTERVALS))
    check_spreads(plan, [{"grad_worker_fraction": w / world} for w in divisors(world)], 1e-8)
