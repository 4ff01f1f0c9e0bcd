// Runs the threads of a kernel as fibers, in an order that a seed decides.
//
// A few blocks are in flight at a time.  One of them is picked, each of its threads that
// can go on runs to the next place where it must wait or may be interrupted, then the next
// block is picked.  When none can go on, a barrier is complete or the kernel is wrong.
#include "scheduler.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

#include "cuda_on_cpu.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#ifdef __x86_64__
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif

// So that the section and its bounds exist in kernels without shared memory.
__attribute__((section("cuda_shared"), used)) static char cuda_shared_anchor[16];
extern "C" {
extern char __start_cuda_shared[] __attribute__((visibility("hidden")));
extern char __stop_cuda_shared[] __attribute__((visibility("hidden")));
}

namespace cpu_cuda {

Place place;
Fiber *running = nullptr;

namespace {

constexpr size_t STACK = 128 * 1024;
constexpr unsigned RESIDENT = 3;   // blocks in flight, at most
constexpr unsigned INTERRUPT = 4;  // one atomic or fence of so many lets others run

void (*entry)(void **);
void **entry_arguments;
std::string failure;
std::vector<char *> spare_stacks;
std::vector<std::unique_ptr<Block>> resident;
Block *current = nullptr;
uint64_t random_state;

unsigned draw(unsigned below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return unsigned(random_state >> 33) % below;
}

template <class T> void shuffle(std::vector<T> &items) {
    for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[draw(i)]);
}

// ---- fibers --------------------------------------------------------------------------
char *take_stack() {
    if (!spare_stacks.empty()) {
        char *stack = spare_stacks.back();
        spare_stacks.pop_back();
        return stack;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED) std::abort();
    mprotect(stack, 4096, PROT_NONE);  // a stack that overflows faults
    return (char *)stack;
}

void give_stack(Fiber &fiber) {
    if (!fiber.stack) return;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(fiber.stack, STACK);
#endif
    spare_stacks.push_back(fiber.stack);
    fiber.stack = nullptr;
}

void leave();

[[noreturn]] void fiber_main() {
    entry(entry_arguments);
    running->state = State::done;
    leave();
    std::abort();
}

#ifdef __x86_64__
void *scheduler_context;

// Keep the registers that a call must preserve on this stack; go on with the other one.
// noipa: g++ would see no effect in its body.
extern "C" __attribute__((naked, noipa, visibility("hidden"))) void cpu_cuda_switch(void **, void *) {
    asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
void prepare(Fiber &fiber) {
    void **top = (void **)(fiber.stack + STACK);
    *--top = nullptr;
    *--top = (void *)fiber_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.context = top;
}
void enter(Fiber &fiber) { cpu_cuda_switch(&scheduler_context, fiber.context); }
void leave() { cpu_cuda_switch(&running->context, scheduler_context); }
#else
// Slower, as it makes system calls; works everywhere.  The context lies at the stack's end.
ucontext_t scheduler_context;

void prepare(Fiber &fiber) {
    auto *context = (ucontext_t *)(fiber.stack + 4096);
    getcontext(context);
    context->uc_stack.ss_sp = context + 1;
    context->uc_stack.ss_size = fiber.stack + STACK - (char *)(context + 1);
    context->uc_link = nullptr;
    makecontext(context, (void (*)())fiber_main, 0);
    fiber.context = context;
}
void enter(Fiber &fiber) { swapcontext(&scheduler_context, (ucontext_t *)fiber.context); }
void leave() { swapcontext((ucontext_t *)running->context, &scheduler_context); }
#endif

void resume(Fiber &fiber) {
    if (!fiber.stack) {
        fiber.stack = take_stack();
        prepare(fiber);
    }
    running = &fiber;
    place.thread = fiber.index;
    enter(fiber);
    running = nullptr;
}

void interrupt() {
    if (draw(INTERRUPT) == 0) leave();
}

// ---- warps ---------------------------------------------------------------------------
bool waits_alike(const Fiber &a, const Fiber &b) {
    return a.state == State::in_warp && a.mask == b.mask && !std::strcmp(a.at, b.at);
}

// Calls with each lane of the fiber's warp that its mask names and that has not ended.
template <class F> bool each_lane(Fiber &fiber, F visit) {
    auto &fibers = fiber.block->fibers;
    int first = fiber.thread & ~31;
    for (int lane = 0; lane < 32 && first + lane < (int)fibers.size(); lane++) {
        Fiber &other = fibers[first + lane];
        if ((fiber.mask >> lane & 1) && other.state != State::done && !visit(lane, other)) return false;
    }
    return true;
}

// Ends the warp operation once all lanes of the mask are in it.
bool complete(Fiber &fiber) {
    if (!each_lane(fiber, [&](int, Fiber &other) { return waits_alike(other, fiber); })) return false;
    uint64_t values[32];
    std::memset(values, 0xFF, sizeof values);  // what a lane that takes no part gives
    each_lane(fiber, [&](int lane, Fiber &other) {
        values[lane] = other.value;
        return true;
    });
    each_lane(fiber, [&](int, Fiber &other) {
        other.value = values[other.source_lane & 31];
        other.state = State::ready;
        return true;
    });
    return true;
}

void warp_operation(unsigned mask, const char *at) {
    Fiber &me = *running;
    if (!(mask >> lane() & 1)) fail(std::string(at) + ": a lane calls that its mask leaves out");
    me.mask = mask;
    me.at = at;
    me.state = State::in_warp;
    if (!complete(me)) leave();
}

// A thread that ends may be the last that others waited for.
void release_warp(Fiber &ended) {
    auto &fibers = ended.block->fibers;
    int first = ended.thread & ~31;
    for (int i = first; i < first + 32 && i < (int)fibers.size(); i++)
        if (fibers[i].state == State::in_warp) complete(fibers[i]);
}

// ---- blocks --------------------------------------------------------------------------
std::unique_ptr<Block> make_block(unsigned number) {
    auto block = std::make_unique<Block>();
    const dim3 &grid = place.grid_size, &size = place.block_size;
    block->number = number;
    block->index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    block->shared.assign(__stop_cuda_shared - __start_cuda_shared, (char)0xFF);
    block->alive = size.x * size.y * size.z;
    block->fibers.resize(block->alive);
    block->order.resize(block->alive);
    std::iota(block->order.begin(), block->order.end(), 0);
    for (unsigned t = 0; t < block->fibers.size(); t++) {
        Fiber &fiber = block->fibers[t];
        fiber.block = block.get();
        fiber.thread = t;
        fiber.index = {t % size.x, t / size.x % size.y, t / size.x / size.y};
    }
    return block;
}

// Puts the block's shared memory where its threads look for it.
void make_current(Block *block) {
    size_t size = __stop_cuda_shared - __start_cuda_shared;
    if (current == block) return;
    if (current) std::memcpy(current->shared.data(), __start_cuda_shared, size);
    if (block) {
        std::memcpy(__start_cuda_shared, block->shared.data(), size);
        place.block = block->index;
    }
    current = block;
}

std::string divergence(const Block &block) {
    char text[300];
    const Fiber *first = nullptr, *second = nullptr;
    int ended = 0;
    for (auto &fiber : block.fibers) {
        if (fiber.state == State::done) ended++;
        else if (!first) first = &fiber;
        else if (!second && (fiber.state != first->state || std::strcmp(fiber.at, first->at))) second = &fiber;
    }
    std::snprintf(text, sizeof text,
                  "divergent barrier or warp operation in block %u: thread %d waits at %s, "
                  "thread %d at %s, %d threads have ended",
                  block.number, first->thread, first->at, second ? second->thread : -1,
                  second ? second->at : "none", ended);
    return text;
}

// Lets the threads of a block pass that all wait at one barrier.
void pass_barrier(Block &block) {
    const char *at = block.fibers[0].at;
    block.any_vote = false;
    for (auto &fiber : block.fibers) {
        if (fiber.state != State::at_barrier || std::strcmp(fiber.at, at)) return fail(divergence(block));
        block.any_vote |= fiber.vote;
    }
    for (auto &fiber : block.fibers) fiber.state = State::ready;
    race::barrier(block);
}

void run_block(Block &block) {
    bool progress = false;
    make_current(&block);
    shuffle(block.order);
    for (int i : block.order) {
        Fiber &fiber = block.fibers[i];
        if (fiber.state != State::ready) continue;
        progress = true;
        resume(fiber);
        if (fiber.state == State::done) {
            block.alive--;
            give_stack(fiber);
            release_warp(fiber);
        }
        if (!failure.empty()) return;
    }
    if (!progress) pass_barrier(block);
}

void drop(size_t at) {
    for (auto &fiber : resident[at]->fibers) give_stack(fiber);
    if (current == resident[at].get()) current = nullptr;
    resident.erase(resident.begin() + at);
}

void run_grid() {
    std::vector<unsigned> waiting(place.grid_size.x * place.grid_size.y * place.grid_size.z);
    std::iota(waiting.begin(), waiting.end(), 0u);
    shuffle(waiting);
    unsigned in_flight = 1 + draw(RESIDENT);
    while (failure.empty() && !(waiting.empty() && resident.empty())) {
        while (resident.size() < in_flight && !waiting.empty()) {
            resident.push_back(make_block(waiting.back()));
            waiting.pop_back();
        }
        size_t at = draw(resident.size());
        run_block(*resident[at]);
        if (failure.empty() && resident[at]->alive == 0) drop(at);
    }
    while (!resident.empty()) drop(0);
}

// ---- float32 as with -ftz=true, the option CuPy adds -----------------------------------
// The CPU's switch flushes float64 too, which a GPU does not.
struct FlushSubnormals {
#ifdef __x86_64__
    unsigned before = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    unsigned long before = __builtin_aarch64_get_fpcr64();
    FlushSubnormals() { __builtin_aarch64_set_fpcr64(before | 1ul << 24); }
    ~FlushSubnormals() { __builtin_aarch64_set_fpcr64(before); }
#endif
};

}  // namespace

// ---- what kernels and the race check call ----------------------------------------------
bool barrier(bool vote, const char *at) {
    running->vote = vote;
    running->at = at;
    running->state = State::at_barrier;
    leave();
    return running->block->any_vote;
}

uint64_t warp_value(unsigned mask, uint64_t value, unsigned source_lane, const char *at) {
    running->value = value;
    running->source_lane = source_lane;
    warp_operation(mask, at);
    return running->value;
}

unsigned lane() { return running->thread & 31; }

void fence() {
    interrupt();
    race::fence();
}

void atomic(const void *address, size_t size, void *code) {
    interrupt();
    race::atomic(address, size, code);
}

void fail(const std::string &what) {
    if (failure.empty()) failure = what;
}

Range shared_memory() { return {__start_cuda_shared, __stop_cuda_shared}; }
Range stack_of(const Fiber &fiber) { return {fiber.stack, fiber.stack + STACK}; }

}  // namespace cpu_cuda

// Runs a whole grid; returns whether it went well, and otherwise what did not.
CPU_CUDA_VISIBLE int cpu_cuda_launch(void (*kernel)(void **), const unsigned *grid, const unsigned *block,
                                     void **arguments, uint64_t seed, char *message, size_t size) {
    using namespace cpu_cuda;
    FlushSubnormals flush;
    entry = kernel;
    entry_arguments = arguments;
    failure.clear();
    random_state = seed * 0x9E3779B97F4A7C15u + 0x1234567u;
    if (!random_state) random_state = 1;
    place.grid_size = dim3(grid[0], grid[1], grid[2]);
    place.block_size = dim3(block[0], block[1], block[2]);
    race::begin_launch();
    run_grid();
    std::snprintf(message, size, "%s", failure.c_str());
    return failure.empty();
}
