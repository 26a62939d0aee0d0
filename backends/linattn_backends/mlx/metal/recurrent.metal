// The recurrence itself, one token after the other, the state in registers.
//
//     S = Diag(e^g) S⁻ Diag(e^gv) + kᵀ v                          o = scale · q S      linear_attn, simple_gla, gla
//     S = Diag(e^g) S⁻ + kᵀ v                                     o = scale · q (S⁻ + Diag(u) kᵀ v)      rwkv6
//     S' = Diag(e^g) S⁻,  S = S' + kᵀ (beta ∘ (v − k S'))         o = scale · q S      the delta families
//     S = Diag(e^g) S⁻ + bᵀ (a S⁻) + kᵀ v                         o = scale · q S      dplr
//
// A simdgroup walks one sequence with ROWS columns of one head's state. Grid (32, ⌈V / ROWS⌉, N · HV).
#include "place.metal"
#ifdef HAS_CHECKPOINTS
#include "checkpoint.metal"
#endif

float S[R];
UNROLL for (int i = 0; i < R; i++) {
#ifdef HAS_INITIAL_STATE
    const int key = part * R + i;
    S[i] = inside && key < K ? static_cast<float>(initial_state[state + key * V]) : 0.0f;
#else
    S[i] = 0.0f;
#endif
}
#ifdef HAS_U
float u_t[R];
load_keys<K, LANES>(u_t, u + head * K, part);
#endif

for (long t = first; t < last; t++) {
#ifdef HAS_CHECKPOINTS
    if ((t - first) % segment_tokens == 0) {
        const long at = (((checkpoint + (t - first) / segment_tokens) * HV + head) * SIMDGROUPS + columns) * R;
        UNROLL for (int i = 0; i < R; i++) scratch_checkpoints[(at + i) * 32 + thread_index_in_simdgroup] = S[i];
    }
#endif
#include "token.metal"
#ifdef HAS_U
    float seen[R];
    UNROLL for (int i = 0; i < R; i++) seen[i] = S[i] + u_t[i] * k_t[i] * v_t;
    const float read = dot_keys<LANES>(q_t, seen);
#endif
#include "step.metal"
#ifndef HAS_U
    const float read = dot_keys<LANES>(q_t, S);
#endif
    if (inside && part == 0) o[own * V + value] = static_cast<O>(scale * read);
}

UNROLL for (int i = 0; i < R; i++) {
    const int key = part * R + i;
    if (inside && key < K) final_state[state + key * V] = S[i];
}
