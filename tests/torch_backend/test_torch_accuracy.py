"""Results of many tokens that forget one another, by matrices for many of them: errors do not grow with the tokens."""

import pytest
from linattn_conformance.cases import named
from linattn_conformance.runner import Runner

FEW_CHANNELS = [
    "delta_rule/parallel/fp32/large.k-loss.state-only.k-reversed.cotangents-sliced.cu_seqlens-state-tracked-varlen.adjacent-zeros.q"
    "/T256-K8-V16-C64-B1-H2/forward",
    "delta_rule/parallel/fp32/plain/T513-K1-V72-B3-H2/gradient",
    "delta_rule/parallel/fp32/plain-seed.2/T621-K2-V8-B2-H2/gradient",
    "gated_delta_rule/parallel/fp32/zero-seed.1/T621-K2-V8-B1-H2/gradient",
    "kda/parallel/fp32/zero-seed.2/T621-K2-V8-B1-H2/gradient",
    "dplr/parallel/fp32/zero-seed.1/T158-K2-V32-B1-H3/gradient",
    "dplr/parallel/fp32/zero-seed.1/T2049-K1-V8-B1-H2/forward",
    "dplr/parallel/fp32/zero-seed.2/T511-K1-V8-B1-H2/gradient",
    "dplr/parallel/fp32/zero-seed.1/T1049-K2-V8-B1-H2/gradient",
    "dplr/parallel/fp32/state-varlen.several-zero-seed.1/T1049-K2-V8-B1-H2/gradient",
    "dplr/chunk/fp32/zero-seed.2/T511-K1-V8-C256-B1-H2/gradient",
]
"""Few channels, so that each token takes much of what those before it wrote."""


@pytest.mark.parametrize("name", FEW_CHANNELS)
def test_what_a_token_takes_away_leaves_no_error(name):
    (result,) = Runner("torch", device="cpu").run([named(name)])
    assert result.status == "passed", result.message
    assert result.error < 0.7
