// Where this lane stands: which keys of which column of which head of which sequence.
constexpr int ROWS = 32 / LANES, R = (K + LANES - 1) / LANES;
const int part = thread_index_in_simdgroup % LANES;
const int row = thread_index_in_simdgroup / LANES;
const int columns = thread_position_in_grid.y;  // index of the simdgroup among those that share a head
const int value = columns * ROWS + row;
const bool inside = value < V;
const int n = thread_position_in_grid.z / HV;
const int head = thread_position_in_grid.z % HV;
#ifdef HAS_CU_SEQLENS
const long first = cu_seqlens[n], last = cu_seqlens[n + 1];
#else
const long first = static_cast<long>(n) * T, last = first + T;
#endif
const long state = (static_cast<long>(n) * HV + head) * K * V + value;  // S[0, value]; keys are V apart
