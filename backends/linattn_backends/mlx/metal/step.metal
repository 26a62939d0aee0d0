// S before token t becomes S after it.
#ifdef HAS_A
const float recalled = dot_keys<LANES>(a_t, S);
#endif
UNROLL for (int i = 0; i < R; i++) S[i] *= KEPT(i) * kept_value;
#if BETA
const float error = v_t - dot_keys<LANES>(k_t, S);
const float written = beta_t * error;
#else
const float written = v_t;
#endif
UNROLL for (int i = 0; i < R; i++) S[i] += k_t[i] * written;
#ifdef HAS_A
UNROLL for (int i = 0; i < R; i++) S[i] += b_t[i] * recalled;
#endif
