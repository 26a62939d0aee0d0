"""The Triton backend: kernels for NVIDIA GPUs.

The map of kernels: for each operator and pass, in the order of the launches, what a stage makes and its kernel. A kernel in a
file ``…_sm90.py`` is in Gluon, for Hopper, and runs there in the place of the plain one above it where shapes and dtypes allow;
``explain`` says which run, and why. Every other kernel runs everywhere, but for the scans of diagonal/, which are not launched
where a block has less than 220 KB of shared memory. A folder is a core. An operator that is no family has a section like the
others. ``tests/triton_backend/test_map.py`` holds all this against what calls launch, ``compiled.json`` beside it what the
compiler makes of every plain kernel for each kind of NVIDIA's GPUs.

`linear_attn`, `simple_gla`, `ssd` in diagonal/::

    forward   running sums of the gate, not linear_attn       gate.py:diagonal_running_sums_fwd
              outputs, the state in registers                 resident.py:diagonal_scan
                on Hopper                                     resident_sm90.py:diagonal_scan_sm90
                on Hopper, K = 256                            resident_wide_sm90.py:diagonal_scan_wide_sm90
              or states, in float32 and of wide heads         memory.py:diagonal_states
                and outputs from them                         memory.py:diagonal_outputs
              segments of long sequences: their own states    memory.py:diagonal_states
                and the states that they begin with           memory.py:diagonal_carries

    backward  running sums of the gate, not linear_attn       gate.py:diagonal_running_sums_fwd
              dv, and dq and dk without a gate                resident.py:diagonal_scan
                on Hopper                                     resident_sm90.py:diagonal_scan_sm90
                on Hopper, K = 256                            resident_wide_sm90.py:diagonal_scan_wide_sm90
              or dv, in float32 and of wide heads             memory.py:diagonal_outputs
              states and their gradients                      memory.py:diagonal_states
              dq, dk, dg, not linear_attn                     memory.py:diagonal_scalar_gradients_bwd
                on Hopper, not linear_attn                    gradients_sm90.py:diagonal_scalar_gradients_bwd_sm90
              or dq, dk, dg, in float32 and of wide heads     memory.py:diagonal_gradients_bwd
              segments: the states that they begin with       memory.py:diagonal_carries

`gla`, `rwkv6` in diagonal/::

    forward   matrices that sum over tokens                   gate.py:diagonal_sum_matrices_fwd
              scores and decayed rows                         vector.py:diagonal_vector_scores_fwd
                strong gates on Hopper, gla only              vector_sm90.py:diagonal_vector_scores_strong_fwd_sm90
              outputs, the state in registers                 vector.py:diagonal_vector_scan
              or states, in float32 and of wide keys          memory.py:diagonal_states
                and outputs from them                         vector.py:diagonal_vector_outputs
                with a gate on values, gla only               memory.py:diagonal_outputs
              segments: the states that they begin with       memory.py:diagonal_carries

    backward  states and their gradients                      memory.py:diagonal_states
              dv, the state's gradient in registers           vector.py:diagonal_vector_scan
              or dv, in float32 and of wide keys              vector.py:diagonal_vector_outputs
              gradients through states, and of scores         vector.py:diagonal_vector_inter_bwd
              matrices that sum over tokens                   gate.py:diagonal_sum_matrices_fwd
              dq, dk, dg, du                                  vector.py:diagonal_vector_intra_bwd
                strong gates on Hopper, gla only              vector_sm90.py:diagonal_vector_intra_strong_bwd_sm90
              all of them with a gate on values, gla only     memory.py:diagonal_gradients_bwd
              segments: the states that they begin with       memory.py:diagonal_carries

`delta_rule`, `gated_delta_rule` in delta/::

    forward   scores                                          scores.py:delta_scores_fwd
              triangular solve                                scores.py:delta_solve_fwd
                both on Hopper                                scores_sm90.py:delta_scores_fwd_sm90
              states, errors, outputs                         state.py:delta_state_fwd
                on Hopper                                     state_sm90.py:delta_state_fwd_sm90
              segments: the states that they begin with       state.py:delta_state_carry
              all in one on Hopper, of many heads             fused_sm90.py:delta_fused_fwd_sm90

    backward  states and errors                               state.py:delta_state_fwd
                on Hopper                                     state_sm90.py:delta_state_fwd_sm90
              their gradients                                 state.py:delta_state_bwd
                on Hopper                                     state_sm90.py:delta_state_bwd_sm90
              segments: the states that they begin with       state.py:delta_state_carry
              dq, dk, dv, dg, dbeta                           gradients.py:delta_gradients_bwd
                on Hopper                                     gradients_sm90.py:delta_gradients_bwd_sm90
                dg from its parts, gated_delta_rule only      gradients.py:delta_gate_bwd

`kda`, `dplr` in delta/::

    forward   scores and decayed rows, weak, strong gates     vector.py:delta_vector_scores_fwd
                with the solve on Hopper, kda only            vector_sm90.py:delta_vector_scores_fwd_sm90
                strong gates on Hopper, kda only              vector_sm90.py:delta_vector_scores_strong_fwd_sm90
                weak gates on Hopper, dplr only               dplr_sm90.py:delta_dplr_scores_fwd_sm90
              triangular solve                                scores.py:delta_solve_fwd
              states, errors, outputs                         state.py:delta_state_fwd
                on Hopper                                     state_sm90.py:delta_state_fwd_sm90
              segments: the states that they begin with       state.py:delta_state_carry
              all in one on Hopper, many heads, dplr only     dplr_fused_sm90.py:delta_dplr_fused_fwd_sm90

    backward  decayed rows                                    vector.py:delta_vector_rows_fwd
                on Hopper, kda only                           vector_sm90.py:delta_vector_scores_fwd_sm90
                on Hopper, dplr only                          dplr_sm90.py:delta_dplr_scores_fwd_sm90
              states and errors                               state.py:delta_state_fwd
                on Hopper                                     state_sm90.py:delta_state_fwd_sm90
              their gradients                                 state.py:delta_state_bwd
                on Hopper                                     state_sm90.py:delta_state_bwd_sm90
                with scores on Hopper, many heads, dplr only  dplr_fused_bwd_sm90.py:delta_dplr_fused_bwd_sm90
              segments: the states that they begin with       state.py:delta_state_carry
              gradients of scores; dv and dbeta, kda          gradients.py:delta_scores_bwd
              dq, dk, dg, da, db, weak and strong gates       vector.py:delta_vector_gradients_bwd
                with all the others on Hopper, kda only       vector_sm90.py:delta_vector_gradients_bwd_sm90
                weak gates on Hopper, dplr only               dplr_sm90.py:delta_dplr_gradients_bwd_sm90
                all, weak gates, heads of 64, dplr only       dplr_gradients_sm90.py:delta_dplr_chunk_bwd_sm90
                all, strong gates, heads of 64, dplr only     dplr_strong_sm90.py:delta_dplr_strong_bwd_sm90
              dv, dplr only                                   vector.py:delta_vector_values_bwd

`linear_attn` in mixed/, with ``causal=False``::

    forward   k'v of every chunk                              states.py:mixed_sums_fwd
              their sum                                       states.py:mixed_states_fwd
              outputs                                         outputs.py:mixed_outputs_fwd

    backward  k'v and q'do of every chunk                     states.py:mixed_sums_fwd
              their sums                                      states.py:mixed_states_fwd
              dq                                              gradients.py:mixed_queries_bwd
              dk                                              gradients.py:mixed_keys_bwd
              dv                                              gradients.py:mixed_values_bwd

`mixed_attn` in mixed/::

    forward   k'v of every chunk                              states.py:mixed_sums_fwd
              states, sums over the chunks before             states.py:mixed_states_fwd
              outputs                                         outputs.py:mixed_outputs_fwd

    backward  k'v and q'do of every chunk                     states.py:mixed_sums_fwd
              states and their gradients                      states.py:mixed_states_fwd
              dq_quad, dq_lin                                 gradients.py:mixed_queries_bwd
              dk_quad, dk_lin                                 gradients.py:mixed_keys_bwd
              dv                                              gradients.py:mixed_values_bwd
              dbias                                           gradients.py:mixed_bias_bwd

    decode    one token of every sequence                     step.py:mixed_step_fwd

`linear_attn`, `simple_gla`, `gla`, `rwkv6`, `delta_rule`, `gated_delta_rule`, `kda`, `dplr`, `ssd` in recurrent/::

    decode    and the recurrent form, token by token          kernels.py:recurrent_tokens_fwd

`linear_attn`, `simple_gla`, `gla` in normalizer/, with ``normalize=True``::

    forward   sums of each chunk's keys                       kernels.py:normalizer_sums
              and over the chunks before                      kernels.py:normalizer_carries
              outputs divided                                 kernels.py:normalizer_outputs_fwd

    backward  gradients of both sides of the division         kernels.py:normalizer_quotients_bwd
              sums of each chunk's queries                    kernels.py:normalizer_sums
              and over the chunks behind                      kernels.py:normalizer_carries
              what is added to dq, dk, dg                     kernels.py:normalizer_gradients_bwd

`short_conv` in conv/::

    forward   outputs                                         kernels.py:conv_outputs_fwd
              final states                                    kernels.py:conv_final_state_fwd

    backward  dx, parts of dw and db                          kernels.py:conv_gradients_bwd
              gradients of initial states                     kernels.py:conv_initial_state_bwd

    decode    a few tokens of every sequence                  kernels.py:conv_tokens_fwd

`gated_rms_norm` in norm/::

    forward   outputs                                         kernels.py:norm_outputs_fwd

    backward  dx, dz, parts of dw                             kernels.py:norm_gradients_bwd

`hedgehog` in features/, a map of queries and keys::

    forward   features                                        kernels.py:features_fwd

    backward  dx, parts of dW and db                          kernels.py:features_bwd

`ssd` in ssd/, around those of diagonal/ and recurrent/::

    forward   step sizes and log decays                       kernels.py:ssd_steps_fwd
              or values, in float32 and of wide heads         kernels.py:ssd_inputs_fwd
              skip and gate                                   kernels.py:ssd_outputs_fwd

    backward  step sizes and log decays                       kernels.py:ssd_steps_fwd
              or values, in float32 and of wide heads         kernels.py:ssd_inputs_fwd
              gradients through the gate                      kernels.py:ssd_outputs_bwd
              ddt, parts of dA, dD and of the bias's          kernels.py:ssd_steps_bwd
              or dx and all these                             kernels.py:ssd_inputs_bwd

    decode    values and log decays of step sizes             kernels.py:ssd_inputs_fwd
              skip and gate                                   kernels.py:ssd_outputs_fwd

`simple_gla`, `delta_rule`, `gated_delta_rule`, `kda` in maps/, of raw projections::

    forward   log decays, writing strengths                   kernels.py:maps_scalars_fwd

    backward  gradients of raw ones, parts of parameters'     kernels.py:maps_scalars_bwd

`delta_rule`, `gated_delta_rule`, `kda` in lib/, of raw queries and keys::

    forward   reciprocal lengths of rows                      lengths.py:reciprocal_lengths

    backward  dq and dk from those of unit rows               lengths.py:unit_row_gradients

`linear_attn`, `simple_gla`, `gla`, `delta_rule`, `gated_delta_rule`, `dplr` in lib/::

    forward   packed sequences cut into chunks and segments   pieces.py:cut_sequences
              zeros behind packed sequences                   tails.py:zero_tails

    backward  packed sequences cut into chunks and segments   pieces.py:cut_sequences
              zeros behind packed sequences                   tails.py:zero_tails

    decode    zeros behind packed sequences                   tails.py:zero_tails

`rwkv6`, `kda`, `ssd` in lib/::

    forward   packed sequences cut, and zeros behind them     pieces.py:cut_sequences

    backward  packed sequences cut into chunks and segments   pieces.py:cut_sequences
              zeros behind packed sequences                   tails.py:zero_tails

    decode    zeros behind packed sequences                   tails.py:zero_tails

`simple_gla`, `gla`, `rwkv6`, `gated_delta_rule`, `kda`, `dplr` in lib/, of ranks that share them::

    forward   chunks that leave anything at the end           reach.py:chunks_in_reach

    backward  chunks that leave anything at the beginning     reach.py:chunks_in_reach

`gated_delta_rule`, `kda`, `dplr` in lib/, of ranks that share them::

    forward   which of them their transitions bear out        reach.py:ranges_proved
              transitions of all chunks where they do not     reach.py:made_anew

    backward  which of them their transitions bear out        reach.py:ranges_proved

`linear_attn`, `simple_gla`, `gla`, `rwkv6`, `delta_rule`, `gated_delta_rule`, `kda`, `dplr` in lib/, of ranks that share them::

    forward   how what a rank tells the others ends           spans.py:span_message_end
              what enters its span, from that of all          spans.py:span_states

    backward  what leaves its span, from gradients of all     spans.py:span_states

`linear_attn`, `simple_gla`, `gla`, `rwkv6`, `delta_rule`, `gated_delta_rule`, `kda`, `dplr`, `ssd` in lib/::

    backward  dq and dk from those of value heads             sums.py:head_sums

`mixed_attn` in lib/::

    forward   packed sequences cut into chunks and segments   pieces.py:cut_sequences
              zeros behind packed sequences                   tails.py:zero_tails

    backward  packed sequences cut into chunks and segments   pieces.py:cut_sequences
              zeros behind packed sequences                   tails.py:zero_tails

`short_conv`, `gated_rms_norm`, `hedgehog`, `simple_gla`, `gated_delta_rule`, `kda`, `ssd` in lib/::

    backward  parameters' gradients from their parts          sums.py:column_sums

Gradients of the recurrent form are the backward pass above.
"""

from .backend import TritonBackend
from .runtime.interpreter import read_scalars

__all__ = ["TritonBackend"]

read_scalars()
