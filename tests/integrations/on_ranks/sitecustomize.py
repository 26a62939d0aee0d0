"""Runs at the start of every Python that fla's tests of ranks start: linattn's functions in fla, and none of fla's instead."""

import fla_on_gpu
from linattn.integrations.seams import AfterImport

AfterImport("fla".__eq__, lambda library: fla_on_gpu.enable()).install()
