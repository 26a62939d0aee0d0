// What every kernel begins with. Float32 throughout; inputs are converted as they are read.

#define UNROLL _Pragma("clang loop unroll(full)")
