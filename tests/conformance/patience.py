"""How long a worker may take on the machine at hand, so that tests of what hangs hold on a busy one."""

import functools
import math
import time

from linattn_conformance.cases import every_case
from linattn_conformance.pool import Pool
from linattn_conformance.worker import Setting

TIMES = 4


@functools.cache
def patience() -> float:
    """Seconds after which a worker hangs: some times what one took here to start, load a backend and run a case."""
    case = next(case for case in every_case() if case.id == "gla/chunk/fp32/state/T97-K24-V40/forward")
    started = time.monotonic()
    with Pool(Setting("linattn_conformance.broken.on_numpy:Honest")) as pool:
        (result,) = pool.run([case])
    assert result.status == "passed", result.message
    return float(math.ceil(TIMES * (time.monotonic() - started)))
