// Gradients of the recurrence, the last token first. dX is the gradient of X; dS that of the state after a token.
//
//     dS += qᵀ do       dq = Σ_v S do       dv = k dS       dk = Σ_v dS v       dg = Σ_v dS ∘ Diag(e^g) S⁻
//     delta:  e = v − k S',  de = beta (k dS)      dv = de       dbeta = (k dS) e       dk = Σ_v (dS beta e − S' de)
//             dS' = dS − kᵀ de                     dg = Σ_v dS' ∘ S'
//     dplr:   dr = b dS                            db = Σ_v dS (a S⁻)       da = Σ_v S⁻ dr       dS⁻ = Diag(e^g) dS + aᵀ dr
//
// S⁻ comes from a replay: the forward kernel left the state before each segment of segment_tokens tokens, from which a segment is run again,
// its states going to scratch memory of which every lane reads only what it wrote. Sums over the columns of a simdgroup are made by
// shuffles, those over the GROUPS simdgroups of a threadgroup in threadgroup memory; what a head's threadgroups find is added later.
// Grid (32, GROUPS · blocks, N · HV), threadgroups (32, GROUPS, 1).
#include "place.metal"
#include "checkpoint.metal"

constexpr int SIZE = (R + ROWS - 1) / ROWS * ROWS;      // R, made divisible by ROWS
constexpr int WIDTH = SUMS * SIZE * LANES + 2;          // what a simdgroup sums: SUMS rows of keys, dbeta and a scalar dg
threadgroup float sums[GROUPS * WIDTH];
const int mine = simdgroup_index_in_threadgroup * WIDTH;
constexpr int BLOCKS = (SIMDGROUPS + GROUPS - 1) / GROUPS;
const long block = columns / GROUPS;                    // which columns this threadgroup sums over
const long simdgroup = static_cast<long>(thread_position_in_grid.z) * (GROUPS * BLOCKS) + columns;

// Adds up a row over the columns of this simdgroup and leaves it in threadgroup memory as row `which`.
#define SUM_COLUMNS(which, expression)                                                                            \
    {                                                                                                             \
        float x[SIZE];                                                                                            \
        UNROLL for (int i = 0; i < SIZE; i++) x[i] = 0.0f;                                                        \
        UNROLL for (int i = 0; i < R; i++) x[i] = inside ? (expression) : 0.0f;                                   \
        sum_columns<LANES, ROWS / 2, SIZE>(x, row);                                                               \
        UNROLL for (int i = 0; i < SIZE / ROWS; i++)                                                              \
            sums[mine + (which * LANES + part) * SIZE + row * (SIZE / ROWS) + i] = x[i];                          \
    }
// Adds up that row over the simdgroups, and stores it.
#define STORE_KEYS(which, target, index)                                                                          \
    for (int key = thread_index_in_threadgroup; key < K; key += 32 * GROUPS) {                                    \
        float sum = 0.0f;                                                                                         \
        for (int s = 0; s < GROUPS; s++) sum += sums[s * WIDTH + (which * LANES + key / R) * SIZE + key % R];     \
        target[(index) * K + key] = sum;                                                                          \
    }
#define STORE_NUMBER(which, target, index)                                                                        \
    if (thread_index_in_threadgroup == 0) {                                                                       \
        float sum = 0.0f;                                                                                         \
        for (int s = 0; s < GROUPS; s++) sum += sums[s * WIDTH + WIDTH - 2 + which];                              \
        target[index] = sum;                                                                                      \
    }

float dS[R];
UNROLL for (int i = 0; i < R; i++) {
#ifdef HAS_D_FINAL_STATE
    const int key = part * R + i;
    dS[i] = inside && key < K ? static_cast<float>(d_final_state[state + key * V]) : 0.0f;
#else
    dS[i] = 0.0f;
#endif
}
#ifdef HAS_U
float u_t[R], du[R];
load_keys<K, LANES>(u_t, u + head * K, part);
UNROLL for (int i = 0; i < R; i++) du[i] = 0.0f;
#endif

for (long segment = (last - first + segment_tokens - 1) / segment_tokens - 1; segment >= 0; segment--) {
    const long begin = first + segment * segment_tokens, end = metal::min(begin + segment_tokens, last);
    float S[R];
    UNROLL for (int i = 0; i < R; i++) {
        const long at = (((checkpoint + segment) * HV + head) * SIMDGROUPS + columns) * R + i;
        S[i] = inside ? checkpoints[at * 32 + thread_index_in_simdgroup] : 0.0f;
    }
    for (long t = begin; t < end; t++) {
        const long at = (simdgroup * segment_tokens + t - begin) * R;
        UNROLL for (int i = 0; i < R; i++) scratch_states[(at + i) * 32 + thread_index_in_simdgroup] = S[i];
        if (t + 1 == end) break;
#include "token.metal"
#include "step.metal"
    }

    for (long t = end - 1; t >= begin; t--) {
#include "token.metal"
        float before[R];
        UNROLL for (int i = 0; i < R; i++) {
            before[i] = scratch_states[((simdgroup * segment_tokens + t - begin) * R + i) * 32 + thread_index_in_simdgroup];
            S[i] = before[i];
        }
#include "step.metal"
        const float do_t = inside ? scale * static_cast<float>(d_o[own * V + value]) : 0.0f;

#ifdef HAS_U
        float uk[R];
        UNROLL for (int i = 0; i < R; i++) uk[i] = u_t[i] * k_t[i];
        const float v_do = v_t * do_t;
        UNROLL for (int i = 0; i < R; i++) du[i] += q_t[i] * k_t[i] * v_do;
        SUM_COLUMNS(0, (before[i] + uk[i] * v_t) * do_t)
        SUM_COLUMNS(1, dS[i] * v_t + u_t[i] * q_t[i] * v_do)
        const float dv_t = dot_keys<LANES>(k_t, dS) + do_t * dot_keys<LANES>(uk, q_t);
#else
        UNROLL for (int i = 0; i < R; i++) dS[i] += q_t[i] * do_t;
        SUM_COLUMNS(0, S[i] * do_t)
        const float recalled_d = dot_keys<LANES>(k_t, dS);
#if BETA
        const float dv_t = beta_t * recalled_d;
        SUM_COLUMNS(1, dS[i] * written - KEPT(i) * before[i] * dv_t)
        UNROLL for (int i = 0; i < R; i++) dS[i] -= k_t[i] * dv_t;
#if BETA == 1
        const float d_beta_t = simd_sum(inside && part == 0 ? recalled_d * error : 0.0f);
        if (thread_index_in_simdgroup == 0) sums[mine + WIDTH - 2] = d_beta_t;
#else
        if (inside && part == 0) d_beta[own * V + value] = static_cast<DBETA>(recalled_d * error);
#endif
#else
        const float dv_t = recalled_d;
        SUM_COLUMNS(1, dS[i] * v_t)
#endif
#endif
        if (inside && part == 0) d_v[own * V + value] = static_cast<O>(dv_t);

#if GATE == 1
        float dg_t = 0.0f;
        UNROLL for (int i = 0; i < R; i++) dg_t += dS[i] * (kept * before[i]);
        dg_t = simd_sum(inside ? dg_t : 0.0f);
        if (thread_index_in_simdgroup == 0) sums[mine + WIDTH - 1] = dg_t;
#elif GATE == 2
        SUM_COLUMNS(2, dS[i] * (kept[i] * kept_value * before[i]))
#endif
#ifdef HAS_GV
        float decayed[R];
        UNROLL for (int i = 0; i < R; i++) decayed[i] = KEPT(i) * kept_value * before[i];
        const float dgv_t = dot_keys<LANES>(dS, decayed);
        if (inside && part == 0) d_gv[own * V + value] = static_cast<DGV>(dgv_t);
#endif
#ifdef HAS_A
        const float d_recalled = dot_keys<LANES>(b_t, dS);
        SUM_COLUMNS(3, before[i] * d_recalled)
        SUM_COLUMNS(4, dS[i] * recalled)
#endif
        UNROLL for (int i = 0; i < R; i++) dS[i] *= KEPT(i) * kept_value;
#ifdef HAS_A
        UNROLL for (int i = 0; i < R; i++) dS[i] += a_t[i] * d_recalled;
#endif
#ifdef HAS_U
        UNROLL for (int i = 0; i < R; i++) dS[i] += q_t[i] * do_t;
#endif

        threadgroup_barrier(mem_flags::mem_threadgroup);
        const long found = block * tokens * HV + own;
        STORE_KEYS(0, d_q, found)
        STORE_KEYS(1, d_k, found)
#if GATE == 1
        STORE_NUMBER(1, d_g, found)
#elif GATE == 2
        STORE_KEYS(2, d_g, found)
#endif
#if BETA == 1
        STORE_NUMBER(0, d_beta, found)
#endif
#ifdef HAS_A
        STORE_KEYS(3, d_a, found)
        STORE_KEYS(4, d_b, found)
#endif
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

UNROLL for (int i = 0; i < R; i++) {
    const int key = part * R + i;
    if (inside && key < K) d_initial_state[state + key * V] = dS[i];
}
#ifdef HAS_U
SUM_COLUMNS(0, du[i])
threadgroup_barrier(mem_flags::mem_threadgroup);
STORE_KEYS(0, d_u, (block * N + n) * HV + head)
#endif
