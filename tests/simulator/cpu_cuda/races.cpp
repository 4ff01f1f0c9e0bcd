// The race check: who touched a byte, and could the one who touches it now know?
//
// Kernels built with -fsanitize=thread call a function before each access; these stand in
// for the library's.  Two accesses of which one writes must be ordered: by being of one
// thread, by a barrier of their block, or, between blocks, by a fence and an atomic of the
// first thread and an atomic and a fence of the second.  Atomics do not race each other.
// (The scheme of FastTrack, Flanagan and Freund, PLDI 2009, with a clock per barrier.)
#include "scheduler.h"

#include <cstdio>
#include <unordered_map>

#include "cuda_on_cpu.h"

namespace cpu_cuda {

void join(Clock &into, const Clock &other) {
    for (auto &[who, time] : other) {
        uint64_t &known = into[who];
        if (known < time) known = time;
    }
}

#ifndef CPU_CUDA_RACES
namespace race {
void begin_launch() {}
void atomic(const void *, size_t, void *) {}
void fence() {}
void barrier(Block &) {}
}  // namespace race
#else
namespace race {
namespace {

struct Access {
    int thread = -1;
    unsigned block = 0;
    uint64_t time = 0;
    bool atomic = false;
    void *code = nullptr;
};
struct Byte {
    Access write;
    std::unordered_map<uint64_t, Access> reads;  // the last of each thread
};

uint64_t now;
std::unordered_map<uint64_t, Byte> bytes;
std::unordered_map<const void *, Clock> published;  // by atomics on an address

bool covers(const Clock &clock, const Access &access) {
    for (int thread : {-1, access.thread}) {
        auto found = clock.find({access.block, thread});
        if (found != clock.end() && found->second >= access.time) return true;
    }
    return false;
}

bool ordered(const Access &before, const Fiber &me) {
    if (before.block == me.block->number) return before.thread == me.thread || before.time <= me.block->barrier_time;
    return covers(me.acquired, before) || covers(me.block->acquired, before);
}

bool conflict(const Access &before, const Access &access, const Fiber &me) {
    return before.thread >= 0 && !(before.atomic && access.atomic) && !ordered(before, me);
}

void report(const char *kind, bool shared, const Access &a, const Access &b) {
    char text[300];
    std::snprintf(text, sizeof text,
                  "race (%s) in %s memory: thread %d of block %u at code %p, thread %d of block %u at code %p", kind,
                  shared ? "shared" : "global", a.thread, a.block, a.code, b.thread, b.block, b.code);
    fail(text);
}

void touch(uint64_t key, bool shared, const Access &access, bool write, const Fiber &me) {
    Byte &byte = bytes[key];
    if (conflict(byte.write, access, me)) report(write ? "write after write" : "read after write", shared, byte.write, access);
    if (!write) {
        byte.reads[(uint64_t)access.block << 16 | access.thread] = access;
        return;
    }
    for (auto &[who, read] : byte.reads)
        if (conflict(read, access, me)) report("write after read", shared, read, access);
    byte.reads.clear();
    byte.write = access;
}

void check(const void *address, size_t size, bool write, bool atomic, void *code) {
    Fiber *me = running;
    if (!me || stack_of(*me).contains(address)) return;
    Range own{(const char *)&place, (const char *)(&place + 1)};
    if (own.contains(address)) return;
    Access access{me->thread, me->block->number, now, atomic, code};
    bool shared = shared_memory().contains(address);
    // Shared memory of different blocks lies at one address.
    uint64_t key = (uint64_t)address ^ (shared ? (uint64_t)(access.block + 1) << 48 : 0);
    for (size_t i = 0; i < size; i++) touch(key + i, shared, access, write, *me);
}

}  // namespace

void begin_launch() {
    now = 1;
    bytes.clear();
    published.clear();
}

void atomic(const void *address, size_t size, void *code) {
    check(address, size, true, true, code);
    join(running->pending, published[address]);
    join(published[address], running->released);
}

void fence() {
    Fiber &me = *running;
    join(me.acquired, me.pending);
    me.released = me.acquired;
    join(me.released, me.block->acquired);
    join(me.released, {{{me.block->number, -1}, me.block->barrier_time}, {{me.block->number, me.thread}, now}});
    now++;
}

void barrier(Block &block) {
    for (auto &fiber : block.fibers) join(block.acquired, fiber.acquired);
    block.barrier_time = now++;
}

}  // namespace race
#endif
}  // namespace cpu_cuda

#ifdef CPU_CUDA_RACES
#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define ACCESS(name, size, write) \
    HOOK __tsan_##name##size(void *p) { cpu_cuda::race::check(p, size, write, false, __builtin_return_address(0)); }
#define ACCESSES(name, write) ACCESS(name, 1, write) ACCESS(name, 2, write) ACCESS(name, 4, write) ACCESS(name, 8, write) ACCESS(name, 16, write)
ACCESSES(read, false)
ACCESSES(write, true)
ACCESSES(unaligned_read, false)
ACCESSES(unaligned_write, true)
ACCESSES(volatile_read, false)
ACCESSES(volatile_write, true)
HOOK __tsan_read_range(void *p, size_t size) { cpu_cuda::race::check(p, size, false, false, __builtin_return_address(0)); }
HOOK __tsan_write_range(void *p, size_t size) { cpu_cuda::race::check(p, size, true, false, __builtin_return_address(0)); }
HOOK __tsan_init() {}
HOOK __tsan_func_entry(void *) {}
HOOK __tsan_func_exit() {}
#endif
