"""Random valid layouts for property tests."""

import itertools
from typing import Any

from hypothesis import strategies as st

from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import DEFAULT_ORDER, ParallelLayout

ORDERS = ["-".join(axes) for axes in itertools.permutations(DEFAULT_ORDER.split("-"))]
SIZES = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 6])
PIPELINES = st.text("Etm|L,()*-12:", min_size=1, max_size=12)


@st.composite
def parallel_layouts(draw: st.DrawFn) -> ParallelLayout:
    """Any layout its constructor accepts, all fields varied."""
    tp, pp, cp, dp = (draw(SIZES) for _ in range(4))
    divisors = [d for d in range(1, tp * cp * dp + 1) if tp * cp * dp % d == 0]
    etp = draw(st.sampled_from([tp, *divisors]))
    experts = tp * cp * dp // etp if tp * cp * dp % etp == 0 else 1
    ep = draw(st.sampled_from([d for d in range(1, experts + 1) if experts % d == 0]))
    values: dict[str, Any] = {
        "vpp": draw(st.sampled_from([None, 2, 3])) if pp > 1 else None,
        "sp": tp > 1 and draw(st.booleans()),
        "mbs": draw(st.integers(1, 9)),
        "pipeline": draw(st.none() | PIPELINES),
    }
    # Not every pair of expert degrees goes with every order or number of instances.
    for order in (draw(st.sampled_from(ORDERS)), DEFAULT_ORDER):
        for instances, dist_opt in (
            (draw(st.sampled_from([1, 2, 3])), True),
            (1, draw(st.booleans())),
        ):
            try:
                return ParallelLayout(
                    tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp, order=order,
                    instances=instances, dist_opt=dist_opt, **values,
                )  # fmt: skip
            except LayoutError:
                continue
    raise AssertionError("the default order and one instance always go")
