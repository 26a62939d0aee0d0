// Enough of the Metal Shading Language to run a compute kernel on a CPU, strictly.
//
// A thread of the kernel is a fiber. Fibers run one at a time, in an order that a seed decides, until they reach something
// that threads do together: a barrier, a shuffle, a product of simdgroup matrices. There the fiber waits for the others.
//
// What a GPU would answer with a wrong number ends the program here, with a message:
// * an element outside a buffer is read or written, or one is read that nobody has written;
// * two threads touch one element, one of them writing, and no barrier between them orders that memory;
// * threads that should meet do not: one has returned, or waits somewhere else;
// * a threadgroup has more threads, or more memory, than Metal guarantees.
// Numbers narrower than float32 convert only where a kernel says so, and double does not exist.
//
// The only change to a kernel's text is that pointers become objects: `const device float*` is `Pointer<const float, device>`.
#pragma once

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <limits>
#include <type_traits>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#include <vector>

using uint = unsigned int;
using ushort = unsigned short;
using ulong = unsigned long;
struct uint3 {
    uint x, y, z;
};
struct ulong2 {
    ulong x, y;
    constexpr ulong2(ulong both = 0) : x(both), y(both) {}
    constexpr ulong2(ulong x, ulong y) : x(x), y(y) {}
};

// Numbers of 16 bits. Arithmetic on them rounds to them on a GPU; without operators, a kernel has to convert to float32 first.

struct half {
    uint16_t bits;
    half() = default;
    explicit half(float x) {
        _Float16 narrow = static_cast<_Float16>(x);
        std::memcpy(&bits, &narrow, 2);
    }
    explicit operator float() const {
        _Float16 narrow;
        std::memcpy(&narrow, &bits, 2);
        return static_cast<float>(narrow);
    }
};
using float16_t = half;

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float x) {
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        bits = std::isnan(x) ? 0x7FC0 : static_cast<uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
};

namespace emulator {

constexpr int SIMD = 32, MOST_THREADS = 1024, MOST_SHARED = 32768, STACK = 1 << 17;

enum Space { device = 1, threadgroup = 2, constant = 4 };

struct Thread;
inline Thread* current = nullptr;
inline int group = 0;  // the threadgroup that runs

[[noreturn]] void fail(const char* format, ...);

// Threads that meet.

struct Meeting {
    const char* name = nullptr;  // what they do together; nullptr: this thread does not wait
    int line = 0, argument = 0;
    bool whole_threadgroup = false;
    void (*act)(Thread** members, int count) = nullptr;
    void* payload = nullptr;
};

struct Thread {
    int index = 0, simdgroup = 0, lane = 0;
    uint3 in_grid{}, in_threadgroup{};
    // Barriers passed that order [device, threadgroup] memory: of the threadgroup, and of at least the simdgroup.
    int threadgroup_epoch[2] = {}, simdgroup_epoch[2] = {};
    Meeting meeting;
    bool started = false, finished = false;
    jmp_buf place;
    ucontext_t birth;
    std::vector<char> stack;
};

inline jmp_buf scheduler;

inline void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fflush(stdout);
    if (current) std::fprintf(stderr, "thread %d of threadgroup %d: ", current->index, group);
    std::vfprintf(stderr, format, arguments);
    std::fprintf(stderr, "\n");
    std::_Exit(1);
}

inline void meet(const Meeting& meeting) {
    current->meeting = meeting;
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

// Memory.

// Who touched one element last, to find accesses that no barrier orders.
struct Touch {
    static constexpr int NOBODY = -1, MANY = -2;
    int group = NOBODY, thread = NOBODY, simdgroup = NOBODY, threadgroup_epoch = 0, simdgroup_epoch = 0;

    static Touch now(int kind) {
        return {emulator::group, current->index, current->simdgroup, current->threadgroup_epoch[kind], current->simdgroup_epoch[kind]};
    }
    // True if what is recorded here happens before `later`, or did not happen.
    bool before(const Touch& later) const {
        if (group == NOBODY) return true;
        if (group != later.group) return false;
        if (thread == later.thread || threadgroup_epoch < later.threadgroup_epoch) return true;
        return simdgroup == later.simdgroup && simdgroup_epoch < later.simdgroup_epoch;
    }
    // The record of several reads: the newest, and whether others share its epoch.
    void join(const Touch& later) {
        bool same = group == later.group && threadgroup_epoch == later.threadgroup_epoch;
        int thread_ = same && thread != later.thread && simdgroup_epoch == later.simdgroup_epoch ? MANY : later.thread;
        int simdgroup_ = same && simdgroup != later.simdgroup ? MANY : later.simdgroup;
        int group_ = group != NOBODY && group != later.group ? MANY : later.group;
        *this = later;
        group = group_, thread = simdgroup_ == MANY ? MANY : thread_, simdgroup = simdgroup_;
    }
};

struct Memory {
    const char* name;
    char* data;
    long count;
    Space space;
    bool output;  // threads may write; every element starts unwritten
    std::vector<Touch> written{}, read{};

    Memory(const char* name, char* data, long count, Space space, bool output)
        : name(name), data(data), count(count), space(space), output(output) {
        if (output) forget();
    }
    void forget() {
        written.assign(count, Touch());
        read.assign(count, Touch());
    }
    int kind() const { return space == threadgroup; }

    void check_read(long index) {
        if (index < 0 || index >= count) fail("%s[%ld] is read, but %s has %ld elements", name, index, name, count);
        if (!output) return;
        Touch now = Touch::now(kind());
        if (written[index].group == Touch::NOBODY) fail("%s[%ld] is read before anybody has written it", name, index);
        if (!written[index].before(now)) fail("%s[%ld] is read, and no barrier orders that after thread %d wrote it", name, index, written[index].thread);
        read[index].join(now);
    }
    void check_write(long index) {
        if (index < 0 || index >= count) fail("%s[%ld] is written, but %s has %ld elements", name, index, name, count);
        Touch now = Touch::now(kind());
        if (!written[index].before(now)) fail("%s[%ld] is written, and no barrier orders that after thread %d wrote it", name, index, written[index].thread);
        if (!read[index].before(now)) fail("%s[%ld] is written, and no barrier orders that after it was read", name, index);
        written[index] = now;
    }
};

template <typename T>
struct Element {  // what `pointer[i]` is where it may be assigned to
    Memory* memory;
    long index;
    operator T() const {
        memory->check_read(index);
        T value;
        std::memcpy(&value, memory->data + index * sizeof(T), sizeof(T));
        return value;
    }
    template <typename U = T, typename = std::enable_if_t<!std::is_same<U, float>::value>>
    explicit operator float() const {
        return static_cast<float>(static_cast<T>(*this));
    }
    const Element& operator=(T value) const {
        memory->check_write(index);
        std::memcpy(memory->data + index * sizeof(T), &value, sizeof(T));
        return *this;
    }
    const Element& operator=(const Element& other) const { return *this = static_cast<T>(other); }
    const Element& operator+=(T value) const { return *this = static_cast<T>(*this) + value; }
    const Element& operator-=(T value) const { return *this = static_cast<T>(*this) - value; }
    const Element& operator*=(T value) const { return *this = static_cast<T>(*this) * value; }
};

template <typename T>
struct Loaded {
    using Type = T;
};
template <typename T>
struct Loaded<Element<T>> {
    using Type = T;
};

template <typename T, Space SPACE>
struct Pointer {
    using Value = std::remove_const_t<T>;
    Memory* memory;
    long index = 0;
    auto operator[](long i) const {
        if constexpr (std::is_const<T>::value)
            return static_cast<Value>(Element<Value>{memory, index + i});
        else
            return Element<Value>{memory, index + i};
    }
    auto operator*() const { return (*this)[0]; }
    Pointer operator+(long i) const { return {memory, index + i}; }
    Pointer operator-(long i) const { return {memory, index - i}; }
    Pointer& operator+=(long i) { return index += i, *this; }
    Pointer& operator-=(long i) { return index -= i, *this; }
    Pointer& operator++() { return *this += 1; }
    operator Pointer<const Value, SPACE>() const { return {memory, index}; }
};

// Threadgroup memory: one array for all threads of a threadgroup, which starts unwritten.

inline std::vector<Memory*> shared_memory;
inline long shared_bytes = 0;

template <typename T>
struct Shared : Pointer<T, threadgroup> {
    std::vector<char> storage;
    Memory owned;
    Shared(const char* name, long count)
        : Pointer<T, threadgroup>{&owned}, storage(count * sizeof(T)), owned(name, storage.data(), count, threadgroup, true) {
        shared_memory.push_back(&owned);
        shared_bytes += count * sizeof(T);
        if (shared_bytes > MOST_SHARED) fail("%ld bytes of threadgroup memory, and Metal has %d", shared_bytes, MOST_SHARED);
    }
};

// Running.

using Body = void (*)(const Thread&);
inline Body body;
inline uint3 groups{}, threads_in_group{}, group_position{}, grid{};

inline void born() {
    body(*current);
    current->finished = true;
    _longjmp(scheduler, 1);
}

inline void resume(Thread& thread) {
    current = &thread;
    if (!_setjmp(scheduler)) {
        if (thread.started) _longjmp(thread.place, 1);
        thread.started = true;
        getcontext(&thread.birth);
        thread.birth.uc_stack.ss_sp = thread.stack.data();
        thread.birth.uc_stack.ss_size = thread.stack.size();
        thread.birth.uc_link = nullptr;
        makecontext(&thread.birth, born, 0);
        setcontext(&thread.birth);
    }
    current = nullptr;
}

// Lets threads go on that wait for each other. All of them have to be at one place of the kernel.
inline bool let_meet(Thread** members, int count, bool whole_threadgroup) {
    Thread* first = nullptr;
    for (int i = 0; i < count; i++) {
        if (!members[i]->meeting.name && !members[i]->finished) return false;
        if (members[i]->meeting.name && members[i]->meeting.whole_threadgroup == whole_threadgroup) first = members[i];
    }
    if (!first) return false;
    for (int i = 0; i < count; i++) {
        const Meeting &here = first->meeting, &there = members[i]->meeting;
        if (members[i]->finished) fail("thread %d waits at %s (line %d), and thread %d has returned", first->index, here.name, here.line, members[i]->index);
        if (there.whole_threadgroup != whole_threadgroup && whole_threadgroup) return false;
        if (here.name != there.name || here.line != there.line || here.argument != there.argument)
            fail("thread %d waits at %s (line %d, %d), and thread %d at %s (line %d, %d)", first->index, here.name, here.line,
                 here.argument, members[i]->index, there.name, there.line, there.argument);
    }
    auto act = first->meeting.act;
    if (act) act(members, count);
    for (int i = 0; i < count; i++) members[i]->meeting.name = nullptr;
    return true;
}

struct Random {
    uint64_t state;
    uint operator()() { return static_cast<uint>((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
};

inline void run_threadgroup(std::vector<Thread>& threads, Random& random) {
    std::vector<Thread*> order;
    for (auto& thread : threads) order.push_back(&thread);
    int n = static_cast<int>(order.size());
    std::vector<Thread*> members = order;
    for (int left = n; left > 0;) {
        bool progress = false;
        for (int i = n - 1; i > 0; i--) std::swap(order[i], order[random() % (i + 1)]);
        for (Thread* thread : order) {
            if (thread->finished || thread->meeting.name) continue;
            resume(*thread);
            progress = true;
            left -= thread->finished;
        }
        for (int first = 0; first < n; first += SIMD) progress |= let_meet(&members[first], std::min(SIMD, n - first), false);
        progress |= let_meet(members.data(), n, true);
        if (!progress && left > 0) fail("threads wait for each other at different places");
    }
}

inline void run(Body kernel, uint3 grid_, uint3 threads_, unsigned seed) {
    body = kernel, grid = grid_, threads_in_group = threads_;
    groups = {(grid.x + threads_.x - 1) / threads_.x, (grid.y + threads_.y - 1) / threads_.y, (grid.z + threads_.z - 1) / threads_.z};
    if (threads_.x * threads_.y * threads_.z > MOST_THREADS) fail("a threadgroup of more than %d threads", MOST_THREADS);
    Random random{seed};
    std::vector<int> order(groups.x * groups.y * groups.z);
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int>(i);
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random() % i]);
    std::vector<std::vector<char>> stacks;
    for (int g : order) {
        group = g;
        group_position = {g % groups.x, g / groups.x % groups.y, g / groups.x / groups.y};
        uint3 origin{group_position.x * threads_.x, group_position.y * threads_.y, group_position.z * threads_.z};
        uint3 size{std::min(threads_.x, grid.x - origin.x), std::min(threads_.y, grid.y - origin.y), std::min(threads_.z, grid.z - origin.z)};
        std::vector<Thread> threads(size.x * size.y * size.z);
        for (size_t i = 0; i < threads.size(); i++) {
            Thread& thread = threads[i];
            thread.index = static_cast<int>(i), thread.simdgroup = thread.index / SIMD, thread.lane = thread.index % SIMD;
            uint n = static_cast<uint>(i);
            thread.in_threadgroup = {n % size.x, n / size.x % size.y, n / size.x / size.y};
            thread.in_grid = {origin.x + thread.in_threadgroup.x, origin.y + thread.in_threadgroup.y, origin.z + thread.in_threadgroup.z};
            if (stacks.size() <= i) stacks.emplace_back(STACK);
            thread.stack.swap(stacks[i]);
        }
        for (Memory* memory : shared_memory) memory->forget();
        run_threadgroup(threads, random);
        for (size_t i = 0; i < threads.size(); i++) stacks[i].swap(threads[i].stack);
    }
}

// What a simdgroup does together: every lane brings a value and takes one away.

template <typename T>
struct Exchange {
    T value, result;
    int from;
};
template <typename T>
Exchange<T>& exchange_of(Thread* thread) {
    return *static_cast<Exchange<T>*>(thread->meeting.payload);
}

template <typename T>
T shuffle(const char* name, T value, int from, int argument, int line) {
    Exchange<T> mine{value, T(), from};
    meet({name, line, argument, false,
          [](Thread** members, int count) {
              for (int i = 0; i < count; i++) {
                  auto& taken = exchange_of<T>(members[i]);
                  if (taken.from < 0 || taken.from >= count) fail("lane %d takes a value from lane %d of %d", i, taken.from, count);
                  taken.result = exchange_of<T>(members[taken.from]).value;
              }
          },
          &mine});
    return mine.result;
}

template <typename T>
T sum(T value, int line) {
    Exchange<T> mine{value, T(), 0};
    meet({"simd_sum", line, 0, false,
          [](Thread** members, int count) {
              T total = T();
              for (int i = 0; i < count; i++) total += exchange_of<T>(members[i]).value;
              for (int i = 0; i < count; i++) exchange_of<T>(members[i]).result = total;
          },
          &mine});
    return mine.result;
}

template <typename T>
T prefix_sum(T value, int line) {
    Exchange<T> mine{value, T(), 0};
    meet({"simd_prefix_inclusive_sum", line, 0, false,
          [](Thread** members, int count) {
              T total = T();
              for (int i = 0; i < count; i++) exchange_of<T>(members[i]).result = total += exchange_of<T>(members[i]).value;
          },
          &mine});
    return mine.result;
}

template <bool WHOLE_THREADGROUP>
void barrier(int spaces, int line) {
    meet({WHOLE_THREADGROUP ? "threadgroup_barrier" : "simdgroup_barrier", line, spaces, WHOLE_THREADGROUP,
          [](Thread** members, int count) {
              for (int i = 0; i < count; i++)
                  for (int kind = 0; kind < 2; kind++)
                      if (members[i]->meeting.argument >> kind & 1) {
                          members[i]->simdgroup_epoch[kind]++;
                          if (WHOLE_THREADGROUP) members[i]->threadgroup_epoch[kind]++;
                      }
          },
          nullptr});
}

}  // namespace emulator

namespace metal {

namespace mem_flags {
constexpr int mem_none = 0, mem_device = 1, mem_threadgroup = 2;
}

inline void threadgroup_barrier(int spaces, int line = __builtin_LINE()) { emulator::barrier<true>(spaces, line); }
inline void simdgroup_barrier(int spaces, int line = __builtin_LINE()) { emulator::barrier<false>(spaces, line); }

template <typename T, typename L = typename emulator::Loaded<T>::Type>
L simd_shuffle_xor(T value, ushort mask, int line = __builtin_LINE()) {
    return emulator::shuffle<L>("simd_shuffle_xor", value, emulator::current->lane ^ mask, mask, line);
}
template <typename T, typename L = typename emulator::Loaded<T>::Type>
L simd_shuffle(T value, ushort lane, int line = __builtin_LINE()) {
    return emulator::shuffle<L>("simd_shuffle", value, lane, 0, line);
}
template <typename T, typename L = typename emulator::Loaded<T>::Type>
L simd_broadcast(T value, ushort lane, int line = __builtin_LINE()) {
    return emulator::shuffle<L>("simd_broadcast", value, lane, lane, line);
}
template <typename T, typename L = typename emulator::Loaded<T>::Type>
L simd_sum(T value, int line = __builtin_LINE()) {
    return emulator::sum<L>(value, line);
}
template <typename T, typename L = typename emulator::Loaded<T>::Type>
L simd_prefix_inclusive_sum(T value, int line = __builtin_LINE()) {
    return emulator::prefix_sum<L>(value, line);
}

inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
template <typename T>
T min(T a, T b) { return a < b ? a : b; }
template <typename T>
T max(T a, T b) { return a < b ? b : a; }
template <typename T>
T clamp(T x, T low, T high) { return min(max(x, low), high); }

// 8 × 8 matrices, of which each lane holds two neighbours in a row.

template <typename T, int ROWS = 8, int COLUMNS = 8>
struct simdgroup_matrix {
    static_assert(ROWS == 8 && COLUMNS == 8, "simdgroup matrices are 8 by 8");
    T elements[2];
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T value) : elements{value, value} {}
    T* thread_elements() { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

template <typename T, int ROWS, int COLUMNS>
simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
    return simdgroup_matrix<T, ROWS, COLUMNS>(value);
}

inline int row_of(int lane) { return (lane / 16) * 4 + lane / 2 % 4; }
inline int column_of(int lane) { return (lane / 8 % 2) * 4 + lane % 2 * 2; }

template <typename T, typename P>
void simdgroup_load(simdgroup_matrix<T>& matrix, P from, ulong stride, ulong2 origin = ulong2(0), bool transpose = false, int line = __builtin_LINE()) {
    static_assert(std::is_same<T, typename P::Value>::value, "a matrix is loaded from memory of its own type");
    emulator::meet({"simdgroup_load", line, 0, false, nullptr, nullptr});
    int lane = emulator::current->lane;
    for (int i = 0; i < 2; i++) {
        long row = row_of(lane), column = column_of(lane) + i;
        if (transpose) std::swap(row, column);
        matrix.elements[i] = static_cast<T>(from[static_cast<long>((origin.y + row) * stride + origin.x + column)]);
    }
}
template <typename T, typename P>
void simdgroup_store(const simdgroup_matrix<T>& matrix, P to, ulong stride, ulong2 origin = ulong2(0), bool transpose = false, int line = __builtin_LINE()) {
    emulator::meet({"simdgroup_store", line, 0, false, nullptr, nullptr});
    int lane = emulator::current->lane;
    for (int i = 0; i < 2; i++) {
        long row = row_of(lane), column = column_of(lane) + i;
        if (transpose) std::swap(row, column);
        to[static_cast<long>((origin.y + row) * stride + origin.x + column)] = matrix.elements[i];
    }
}

// d = a b + c
template <typename T>
void simdgroup_multiply_accumulate(simdgroup_matrix<T>& d, const simdgroup_matrix<T>& a, const simdgroup_matrix<T>& b, const simdgroup_matrix<T>& c, int line = __builtin_LINE()) {
    struct Operands {
        const T *a, *b, *c;
        T d[2];
    } mine{a.elements, b.elements, c.elements, {}};
    emulator::meet({"simdgroup_multiply_accumulate", line, 0, false,
                    [](emulator::Thread** members, int count) {
                        if (count != emulator::SIMD) emulator::fail("a simdgroup of %d multiplies matrices", count);
                        T A[8][8], B[8][8];
                        auto operands = [&](int lane) { return static_cast<Operands*>(members[lane]->meeting.payload); };
                        for (int lane = 0; lane < count; lane++)
                            for (int i = 0; i < 2; i++) {
                                A[row_of(lane)][column_of(lane) + i] = operands(lane)->a[i];
                                B[row_of(lane)][column_of(lane) + i] = operands(lane)->b[i];
                            }
                        for (int lane = 0; lane < count; lane++)
                            for (int i = 0; i < 2; i++) {
                                T total = operands(lane)->c[i];
                                for (int j = 0; j < 8; j++) total += A[row_of(lane)][j] * B[j][column_of(lane) + i];
                                operands(lane)->d[i] = total;
                            }
                    },
                    &mine});
    d.elements[0] = mine.d[0], d.elements[1] = mine.d[1];
}
template <typename T>
void simdgroup_multiply(simdgroup_matrix<T>& d, const simdgroup_matrix<T>& a, const simdgroup_matrix<T>& b, int line = __builtin_LINE()) {
    simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<T>(T(0)), line);
}

}  // namespace metal

using namespace metal;

// The buffers of one launch: sizes and seed in `arguments`, contents in a file, outputs into another.

namespace emulator {

struct Launch {
    std::vector<std::vector<char>> contents;
    std::vector<Memory*> memories;

    template <typename T, Space SPACE>
    Pointer<T, SPACE> pointer(int index) const {
        return {memories[index]};
    }
    template <typename T>
    T value(int index) const {
        T value;
        std::memcpy(&value, contents[index].data(), sizeof(T));
        return value;
    }
};
inline Launch launch;

struct Buffer {
    const char* name;
    long element_size;
    Space space;
    bool output;
};

// kernel IN OUT SEED GRID(3) THREADS(3) BYTES(one per buffer)
inline int run_program(int, char** argument, Body kernel, const std::vector<Buffer>& buffers) {
    auto number = [&](int i) { return std::strtol(argument[i], nullptr, 10); };
    auto triple = [&](int i) { return uint3{static_cast<uint>(number(i)), static_cast<uint>(number(i + 1)), static_cast<uint>(number(i + 2))}; };
    std::FILE* in = std::fopen(argument[1], "rb");
    for (size_t i = 0; i < buffers.size(); i++) {
        auto& content = launch.contents.emplace_back(number(static_cast<int>(10 + i)), '\xff');
        if (!buffers[i].output && std::fread(content.data(), 1, content.size(), in) != content.size()) fail("input is short");
    }
    std::fclose(in);
    for (size_t i = 0; i < buffers.size(); i++)
        launch.memories.push_back(new Memory(buffers[i].name, launch.contents[i].data(), static_cast<long>(launch.contents[i].size()) / buffers[i].element_size, buffers[i].space, buffers[i].output));
    run(kernel, triple(4), triple(7), static_cast<unsigned>(number(3)));
    std::FILE* out = std::fopen(argument[2], "wb");
    for (size_t i = 0; i < buffers.size(); i++) {
        if (!buffers[i].output) continue;
        bool incomplete = std::getenv("INCOMPLETE") || std::strncmp(buffers[i].name, "scratch", 7) == 0;
        for (long j = 0; !incomplete && j < launch.memories[i]->count; j++)
            if (launch.memories[i]->written[j].group == Touch::NOBODY) fail("%s[%ld] was never written", buffers[i].name, j);
        std::fwrite(launch.contents[i].data(), 1, launch.contents[i].size(), out);
    }
    std::fclose(out);
    return 0;
}

}  // namespace emulator

#define double linattn_metal_has_no_double
#define thread  // the address space that C++ has
