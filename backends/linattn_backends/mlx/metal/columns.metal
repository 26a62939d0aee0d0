// Sum over the columns of a simdgroup, for each of SIZE keys. At each level a lane gives half of its keys away, so that in the end
// the lane of column `row` has the sums of SIZE / ROWS keys, from row · SIZE / ROWS on, at the beginning of x.
template <int LANES, int STEP, int SIZE, int N>
void sum_columns(thread float (&x)[N], int row) {
    if constexpr (STEP > 0) {
        const bool upper = (row & STEP) != 0;
        UNROLL for (int i = 0; i < SIZE / 2; i++) {
            const float kept = upper ? x[i + SIZE / 2] : x[i];
            const float given = upper ? x[i] : x[i + SIZE / 2];
            x[i] = kept + simd_shuffle_xor(given, static_cast<ushort>(STEP * LANES));
        }
        sum_columns<LANES, STEP / 2, SIZE / 2>(x, row);
    }
}
