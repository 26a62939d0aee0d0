// Where the states lie that the backward pass begins segments with, R numbers a lane: [segments, HV, SIMDGROUPS, R, 32]. Those of
// sequence n follow each other from `checkpoint` on.
constexpr int SIMDGROUPS = (V + ROWS - 1) / ROWS;
const long checkpoint = first / segment_tokens + n;
