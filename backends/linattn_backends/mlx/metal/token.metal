// Token t: its rows for the keys of this lane, its numbers for the column.
const long own = t * HV + head;
float q_t[R], k_t[R];
load_keys<K, LANES>(q_t, q + (t * H + head / (HV / H)) * K, part);
load_keys<K, LANES>(k_t, k + (t * H + head / (HV / H)) * K, part);
const float v_t = inside ? static_cast<float>(v[own * V + value]) : 0.0f;
#if GATE == 1
const float kept = metal::exp(static_cast<float>(g[own]));
#define KEPT(i) kept
#elif GATE == 2
float kept[R];
load_keys<K, LANES>(kept, g + (t * GATE_HEADS + head / (HV / GATE_HEADS)) * K, part);
UNROLL for (int i = 0; i < R; i++) kept[i] = metal::exp(kept[i]);
#define KEPT(i) kept[i]
#else
#define KEPT(i) 1.0f
#endif
#ifdef HAS_GV
const float kept_value = inside ? metal::exp(static_cast<float>(gv[own * V + value])) : 1.0f;
#else
const float kept_value = 1.0f;
#endif
#if BETA == 1
const float beta_t = static_cast<float>(beta[own]);
#elif BETA == 2
const float beta_t = inside ? static_cast<float>(beta[own * V + value]) : 0.0f;
#endif
#ifdef HAS_A
float a_t[R], b_t[R];
load_keys<K, LANES>(a_t, a + own * K, part);
load_keys<K, LANES>(b_t, b + own * K, part);
#endif
