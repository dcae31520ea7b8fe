// CUDA's built-in names on a CPU: the blocks of a grid run one after another, the threads of a block as fibers that
// take turns at barriers. A barrier that not all of its threads reach ends the launch with 1, where a GPU would hang.
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct uint3 { unsigned x, y, z; };
static thread_local uint3 threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }

namespace host {
constexpr int WARP = 32, MAX_THREADS = 1024, STACK = 1 << 16;

struct Barrier {
    int arrived = 0;
    unsigned phase = 0;
};

struct Fiber {
    ucontext_t context; // to begin with: to change it asks the kernel each time, a jump doesn't
    jmp_buf resume;
    bool begun, done;
};

static thread_local std::vector<Fiber> fibers;
static thread_local std::unique_ptr<char[]> stacks;
static thread_local jmp_buf scheduler;
static thread_local Barrier of_block, of_warp[MAX_THREADS / WARP];
static thread_local float lanes[MAX_THREADS];
static thread_local void (*body)();
static thread_local bool progress;

__attribute__((noinline)) inline void suspend(unsigned self) {
    if (!_setjmp(fibers[self].resume)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume_fiber(unsigned self) {
    threadIdx.x = self;
    if (_setjmp(scheduler)) return;
    if (fibers[self].begun) _longjmp(fibers[self].resume, 1);
    fibers[self].begun = true;
    setcontext(&fibers[self].context);
}

inline void wait(Barrier &barrier, int count) {
    unsigned phase = barrier.phase;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.phase;
        progress = true;
    } else
        while (barrier.phase == phase) suspend(threadIdx.x);
}

// A fiber runs its thread of one block after another.
inline void begin() {
    for (;;) {
        body();
        fibers[threadIdx.x].done = progress = true;
        suspend(threadIdx.x);
    }
}

inline void prepare(unsigned count) {
    if (fibers.size() < count) {
        fibers.resize(count);
        stacks.reset(new char[std::size_t(count) * STACK]);
    }
    for (unsigned self = 0; self < count; ++self) {
        getcontext(&fibers[self].context);
        fibers[self].context.uc_stack.ss_sp = &stacks[std::size_t(self) * STACK];
        fibers[self].context.uc_stack.ss_size = STACK;
        fibers[self].begun = false;
        makecontext(&fibers[self].context, begin, 0);
    }
}

// Whether all threads of a block came to the end.
inline bool block(unsigned count) {
    of_block = Barrier();
    for (Barrier &each : of_warp) each = Barrier();
    for (unsigned self = 0; self < count; ++self) fibers[self].done = false;
    for (unsigned left = count; left;) {
        progress = false;
        left = 0;
        for (unsigned self = 0; self < count; ++self)
            if (!fibers[self].done) {
                resume_fiber(self);
                left += !fibers[self].done;
            }
        if (left && !progress) return false;
    }
    return true;
}

template <class... Arguments, std::size_t... I>
int launch(void (*kernel)(Arguments...), std::index_sequence<I...>, unsigned x, unsigned y, unsigned threads,
           void **arguments) {
    static thread_local void (*function)(Arguments...);
    static thread_local void **values;
    function = kernel;
    values = arguments;
    body = [] { function(*static_cast<Arguments *>(values[I])...); };
    gridDim = {x, y, 1};
    blockDim = {threads, 1, 1};
    prepare(threads);
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
            if (!block(threads)) return 1;
    return 0;
}

template <class... Arguments>
int launch(void (*kernel)(Arguments...), unsigned x, unsigned y, unsigned threads, void **arguments) {
    return launch(kernel, std::index_sequence_for<Arguments...>(), x, y, threads, arguments);
}
} // namespace host

inline void __syncthreads() { host::wait(host::of_block, blockDim.x); }

inline float __shfl_xor_sync(unsigned, float x, int lane_mask) {
    unsigned self = threadIdx.x;
    unsigned first = self / host::WARP * host::WARP;
    int count = blockDim.x - first < host::WARP ? blockDim.x - first : host::WARP;
    host::lanes[self] = x;
    host::wait(host::of_warp[self / host::WARP], count);
    x = host::lanes[self ^ lane_mask];
    host::wait(host::of_warp[self / host::WARP], count);
    return x;
}
