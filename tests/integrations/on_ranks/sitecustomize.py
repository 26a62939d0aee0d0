"""Runs at the start of every Python that fla's tests of ranks start: linattn's functions in fla, and none of fla's instead.

With ``JUDGED_CPUS`` set, there seem to be as many GPUs, and ranks run on CPUs with gloo between them; with
``JUDGED_AS_IT_IS``, fla keeps its own functions.
"""

import os

from linattn.integrations.seams import AfterImport

CPUS = int(os.environ.get("JUDGED_CPUS", "0"))
AS_IT_IS = "JUDGED_AS_IT_IS" in os.environ
differing = []
"""What fla's comparison said of arrays that differ; its tests print that, and say only that they failed."""


def after_fla(library):
    """What is left of fla's kernels is not tuned."""
    import fla.utils
    import fla_on_gpu
    from linattn_benchmarks import tuning

    tuning.untuned().__enter__()
    if not AS_IT_IS:
        fla_on_gpu.enable()
    compare = fla.utils.assert_close

    def assert_close(*args, **kwargs):
        try:
            compare(*args, **kwargs)
        except AssertionError as error:
            differing.append(" ".join(str(error).split()))
            raise

    fla.utils.assert_close = assert_close


def after_cuda(library):
    """GPUs that nobody may use."""
    library.device_count, library.set_device = lambda: CPUS, lambda device: None


def after_distributed(library):
    """Ranks meet where the plug-in says, not at the port of the test; one that called nothing of linattn's fails at its end."""
    meet, part = library.init_process_group, library.destroy_process_group

    def init_process_group(backend, **where):
        where["init_method"] = f"file://{os.environ['JUDGED_MEETING']}"
        if not CPUS:
            return meet(backend, **where)
        import judged_on_cpu
        import torch

        torch.set_num_threads(1)
        judged_on_cpu.OnCpu().__enter__()
        return meet("gloo", **where)

    def destroy_process_group():
        import fla_on_gpu

        part()
        assert not differing, differing[0]
        assert AS_IT_IS or fla_on_gpu.ran or fla_on_gpu.reasons, "refused by linattn: none of its functions ran"

    library.init_process_group, library.destroy_process_group = init_process_group, destroy_process_group


AfterImport("fla".__eq__, after_fla).install()
AfterImport("torch.distributed".__eq__, after_distributed).install()
if CPUS:
    AfterImport("torch.cuda".__eq__, after_cuda).install()
