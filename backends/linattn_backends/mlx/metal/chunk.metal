// The recurrence eight tokens at a time, in products of 8 × 8 matrices.
//
// In a chunk, with D_ts the decay from token s to token t (e^{g_{s+1} + … + g_t}), D_t that from the chunk's beginning to t, D_C to its end:
//
//     A_ts = scale · Σ_k q_tk k_sk D_ts,  s ≤ t                    L_ts = beta_t Σ_k k_tk k_sk D_ts,  s < t
//     U = v;  delta: U = (I + L)⁻¹ beta (v − (k ∘ D_t) S⁻)
//     o = scale (q ∘ D_t) S⁻ + A U                                 S = D_C S⁻ + (k ∘ D_C / D_t)ᵀ U
//
// Every D is the exponential of a sum of gates, never a quotient: none overflows, and g = -inf is a hard reset. A simdgroup holds eight
// columns of the state, as TILES matrices in registers; what does not depend on the column is prepared in threadgroup memory by
// the GROUPS simdgroups of a threadgroup together. Grid (32, GROUPS · blocks, N · HV), threadgroups (32, GROUPS, 1).
constexpr int C = 8, TILES = (K + 7) / 8, WIDTH = 8 * TILES;
threadgroup float queries[C * WIDTH];   // scale q ∘ D_t
threadgroup float keys[C * WIDTH];      // k ∘ D_C / D_t
threadgroup float kept[WIDTH];          // D_C
threadgroup float attention[C * C];     // A
#if BETA
threadgroup float recalling[C * WIDTH]; // k ∘ D_t
threadgroup float lower[C * C];         // L
threadgroup float inverse[C * C];       // (I + L)⁻¹
#endif

// Of a matrix, a lane holds two neighbours: row `row`, columns `column` and `column` + 1.
const int lane = thread_index_in_simdgroup;
const int row = lane / 16 * 4 + lane / 2 % 4;
const int column = lane / 8 % 2 * 4 + lane % 2 * 2;
const int value = thread_position_in_grid.y * C + column;
const int n = thread_position_in_grid.z / HV;
const int head = thread_position_in_grid.z % HV;
#ifdef HAS_CU_SEQLENS
const long first = cu_seqlens[n], last = cu_seqlens[n + 1];
#else
const long first = static_cast<long>(n) * T, last = first + T;
#endif
const long state = (static_cast<long>(n) * HV + head) * K * V + value;

simdgroup_matrix<float, 8, 8> S[TILES];
UNROLL for (int tile = 0; tile < TILES; tile++) {
    UNROLL for (int i = 0; i < 2; i++) {
        float before = 0.0f;
#ifdef HAS_INITIAL_STATE
        const int key = tile * 8 + row;
        if (key < K && value + i < V) before = static_cast<float>(initial_state[state + key * V + i]);
#endif
        S[tile].thread_elements()[i] = before;
    }
}

for (long begin = first; begin < last; begin += C) {
    const int count = last - begin < C ? static_cast<int>(last - begin) : C;
    const long shared_head = head / (HV / H);
    // What each key channel needs for itself.
    for (int key = thread_index_in_threadgroup; key < WIDTH; key += 32 * GROUPS) {
        float k_t[C], g_t[C];
        float sum = 0.0f;
        UNROLL for (int t = 0; t < C; t++) {
            const bool real = t < count && key < K;
            const long at = ((begin + t) * H + shared_head) * K + key;
            const float q_t = real ? static_cast<float>(q[at]) : 0.0f;
            k_t[t] = real ? static_cast<float>(k[at]) : 0.0f;
#if GATE == 1
            g_t[t] = real ? static_cast<float>(g[(begin + t) * HV + head]) : 0.0f;
#elif GATE == 2
            g_t[t] = real ? static_cast<float>(g[((begin + t) * GATE_HEADS + head / (HV / GATE_HEADS)) * K + key]) : 0.0f;
#else
            g_t[t] = 0.0f;
#endif
            sum += g_t[t];
            queries[t * WIDTH + key] = scale * q_t * metal::exp(sum);
#if BETA
            recalling[t * WIDTH + key] = k_t[t] * metal::exp(sum);
#endif
        }
        float rest = 0.0f;
        UNROLL for (int t = C - 1; t >= 0; t--) {
            keys[t * WIDTH + key] = k_t[t] * metal::exp(rest);
            rest += g_t[t];
        }
        kept[key] = metal::exp(rest);
    }
    // What pairs of tokens need: simdgroup s has the column s of A and of L, its lanes share the keys.
    for (int s = simdgroup_index_in_threadgroup; s < C; s += GROUPS) {
        float a[C], l[C];
        UNROLL for (int t = 0; t < C; t++) a[t] = l[t] = 0.0f;
        for (int key = lane; key < K && s < count; key += 32) {
            const float k_s = static_cast<float>(k[((begin + s) * H + shared_head) * K + key]);
            float sum = 0.0f;
            UNROLL for (int t = 0; t < C; t++) {
                if (t < s || t >= count) continue;
                const long at = ((begin + t) * H + shared_head) * K + key;
#if GATE == 1
                if (t > s) sum += static_cast<float>(g[(begin + t) * HV + head]);
#elif GATE == 2
                if (t > s) sum += static_cast<float>(g[((begin + t) * GATE_HEADS + head / (HV / GATE_HEADS)) * K + key]);
#endif
                const float decayed = k_s * metal::exp(sum);
                a[t] += static_cast<float>(q[at]) * decayed;
                if (t > s) l[t] += static_cast<float>(k[at]) * decayed;
            }
        }
        UNROLL for (int t = 0; t < C; t++) {
            const float sum = scale * simd_sum(a[t]);
            if (lane == 0) attention[t * C + s] = sum;
#if BETA
            const float below = simd_sum(l[t]);
            if (lane == 0) lower[t * C + s] = t < count ? below * static_cast<float>(beta[(begin + t) * HV + head]) : 0.0f;
#endif
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#if BETA
    if (thread_index_in_threadgroup < C) {  // a column of the inverse by forward substitution
        float x[C];
        UNROLL for (int t = 0; t < C; t++) {
            x[t] = t == lane ? 1.0f : 0.0f;
            UNROLL for (int s = 0; s < t; s++) x[t] -= lower[t * C + s] * x[s];
            inverse[t * C + lane] = x[t];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif

    simdgroup_matrix<float, 8, 8> out = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_matrix<float, 8, 8> operand, U, written;
#if BETA
    simdgroup_matrix<float, 8, 8> recalled = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#endif
    UNROLL for (int tile = 0; tile < TILES; tile++) {
        simdgroup_load(operand, queries + tile * 8, WIDTH);
        simdgroup_multiply_accumulate(out, operand, S[tile], out);
#if BETA
        simdgroup_load(operand, recalling + tile * 8, WIDTH);
        simdgroup_multiply_accumulate(recalled, operand, S[tile], recalled);
#endif
    }
    const long own = (begin + row) * HV + head;
    UNROLL for (int i = 0; i < 2; i++) {
        const bool real = row < count && value + i < V;
        U.thread_elements()[i] = real ? static_cast<float>(v[own * V + value + i]) : 0.0f;
#if BETA
        const float error = U.thread_elements()[i] - recalled.thread_elements()[i];
        U.thread_elements()[i] = real ? static_cast<float>(beta[own]) * error : 0.0f;
#endif
    }
#if BETA
    simdgroup_load(operand, inverse, C);
    simdgroup_multiply(written, operand, U);
#else
    written = U;
#endif
    simdgroup_load(operand, attention, C);
    simdgroup_multiply_accumulate(out, operand, written, out);
    UNROLL for (int i = 0; i < 2; i++) {
        if (row < count && value + i < V) o[own * V + value + i] = static_cast<O>(out.thread_elements()[i]);
    }
    UNROLL for (int tile = 0; tile < TILES; tile++) {
        UNROLL for (int i = 0; i < 2; i++) S[tile].thread_elements()[i] *= kept[tile * 8 + row];
        simdgroup_load(operand, keys + tile * 8, WIDTH, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(S[tile], operand, written, S[tile]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

UNROLL for (int tile = 0; tile < TILES; tile++) {
    UNROLL for (int i = 0; i < 2; i++) {
        const int key = tile * 8 + row;
        if (key < K && value + i < V) final_state[state + key * V + i] = S[tile].thread_elements()[i];
    }
}
