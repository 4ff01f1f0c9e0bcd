// What the scheduler and the race check know of a running kernel.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace cpu_cuda {

// Up to which moment accesses are visible; thread -1 means all threads of the block.
using Clock = std::map<std::pair<unsigned, int>, uint64_t>;

void join(Clock &into, const Clock &other);

enum class State { ready, at_barrier, in_warp, done };

struct Block;

struct Fiber {
    Block *block = nullptr;
    int thread = 0;  // in its block, counted through all dimensions
    uint3 index{};
    State state = State::ready;
    char *stack = nullptr;
    void *context = nullptr;

    // What it waits with.
    const char *at = "";
    bool vote = false;
    unsigned mask = 0, source_lane = 0;
    uint64_t value = 0;

    // Race check: seen and published by fences, seen by atomics before a fence.
    Clock acquired, released, pending;
};

struct Block {
    unsigned number = 0;
    uint3 index{};
    std::vector<Fiber> fibers;
    std::vector<int> order;
    std::vector<char> shared;
    int alive = 0;
    bool any_vote = false;
    uint64_t barrier_time = 0;  // race check: when its last barrier was complete
    Clock acquired;
};

struct Range {
    const char *begin, *end;
    bool contains(const void *p) const { return begin <= (const char *)p && (const char *)p < end; }
};

extern Fiber *running;  // null outside kernels
void fail(const std::string &what);
Range shared_memory();
Range stack_of(const Fiber &fiber);

// The race check's part; nothing where kernels are built without it.
namespace race {
void begin_launch();
void atomic(const void *address, size_t size, void *code);
void fence();
void barrier(Block &block);
}  // namespace race

}  // namespace cpu_cuda
