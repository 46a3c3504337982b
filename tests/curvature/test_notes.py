"""Numbers that reach the host a step later."""

from __future__ import annotations

import copy
import math
import warnings

import pytest

from kaisa_optim import KFACSGD
from tests.support.training import as_on_a_gpu, network, train


def test_sums_that_were_left_out_are_named_a_step_later_where_no_host_waits():
    model = network()
    how = {"compute_method": "inverse", "inv_update_steps": 4, "staggered": False, "kl_clip": None}
    opt = KFACSGD(model, lr=0.0, factor_update_steps=1, **how)
    with as_on_a_gpu():
        train(model, opt, range(3))
        before = copy.deepcopy(model.state_dict())
        handle = model[1].register_forward_hook(lambda m, i, out: out * math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, opt, range(3, 5))  # of which the last one refreshes
        handle.remove()
        model.load_state_dict(before)  # NaN times a rate of zero is NaN
        with pytest.warns(UserWarning, match="statistics that were not finite have been left out"):
            train(model, opt, range(5, 6))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, opt, range(6, 12))
