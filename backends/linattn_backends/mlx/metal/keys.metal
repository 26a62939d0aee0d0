// How a state S [K, V] lies in registers: a column of S belongs to LANES neighbouring lanes of a simdgroup, R = ⌈K / LANES⌉ keys
// each, and a simdgroup holds ROWS = 32 / LANES columns. `part` says which keys a lane has, `value` which column.

// The keys of one lane from a row of K numbers; zeros beyond the last.
template <int K, int LANES, int R, typename P>
void load_keys(thread float (&x)[R], P row, int part) {
    UNROLL for (int i = 0; i < R; i++) {
        const int key = part * R + i;
        x[i] = (K == R * LANES || key < K) ? static_cast<float>(row[key]) : 0.0f;
    }
}

// Sum over the lanes that share a column: over keys.
template <int LANES>
float sum_keys(float x) {
    UNROLL for (ushort distance = 1; distance < LANES; distance *= 2) x += simd_shuffle_xor(x, distance);
    return x;
}

template <int LANES, int R>
float dot_keys(thread const float (&x)[R], thread const float (&y)[R]) {
    float sum = 0.0f;
    UNROLL for (int i = 0; i < R; i++) sum += x[i] * y[i];
    return sum_keys<LANES>(sum);
}
