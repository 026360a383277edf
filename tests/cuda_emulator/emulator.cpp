// The emulator's scheduler: fibers, barriers, shared memory.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, gridDim;

namespace emulator {

Machine machine;

namespace {

constexpr size_t kStack = 128 * 1024;
constexpr uint8_t kPoison = 0xFF;

struct Barrier {
  int expected = 0, arrived = 0;
  long generation = 0;
};

struct Copy {
  uint32_t target;
  const void* source;
  int bytes, valid;
};

struct Block {
  dim3 index;
  int rank;
  std::vector<uint8_t> shared;
  Barrier barrier;
};

struct Warp {
  Barrier barrier;
  Deposit deposits[2][kWarp];  // alternating: a slow lane still reads while a fast one deposits
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<uint8_t[]> stack{new uint8_t[kStack]};
  unsigned thread;
  Block* block;
  Warp* warp;
  int exchanges = 0;
  const Barrier* waiting = nullptr;
  long generation = 0;
  bool done = false;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

Fiber* current = nullptr;
ucontext_t scheduler;
const std::function<void()>* body = nullptr;
std::vector<std::unique_ptr<Block>> blocks;
Barrier cluster_barrier;

void entry() {
  (*body)();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

void wait(Barrier& b) {
  if (++b.arrived == b.expected) {
    b.arrived = 0;
    ++b.generation;
    return;
  }
  current->waiting = &b;
  current->generation = b.generation;
  swapcontext(&current->context, &scheduler);
}

}  // namespace

void sync_block() { wait(current->block->barrier); }
void sync_cluster() { wait(cluster_barrier); }
int lane() { return static_cast<int>(current->thread % kWarp); }
int cluster_rank() { return current->block->rank; }
uint8_t* shared_memory(int rank) { return blocks[rank]->shared.data(); }

const Deposit* exchange(const Deposit& mine) {
  auto& side = current->warp->deposits[current->exchanges++ % 2];
  side[lane()] = mine;
  wait(current->warp->barrier);
  return side;
}

void queue_copy(uint32_t target, const void* source, int bytes, int valid) {
  if (reinterpret_cast<uintptr_t>(source) % bytes || target % bytes || valid < 0 || valid > bytes) {
    std::fprintf(stderr, "misaligned asynchronous copy\n");
    std::abort();
  }
  current->open.push_back({target, source, bytes, valid});
}

void commit_copies() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

void wait_copies(int pending) {
  auto& groups = current->groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& c : groups.front()) {
      uint8_t* target = current->block->shared.data() + c.target;
      std::memset(target, 0, static_cast<size_t>(c.bytes));
      if (c.valid) std::memcpy(target, c.source, static_cast<size_t>(c.valid));
    }
    groups.erase(groups.begin());
  }
}

namespace {

// Fibers for the blocks first .. first + cluster - 1 of row y, at the kernel's start.
size_t prepare(std::vector<std::unique_ptr<Fiber>>& pool, std::vector<std::unique_ptr<Warp>>& warps,
               unsigned first, unsigned y, unsigned threads, int cluster, size_t shared_bytes) {
  blocks.clear();
  cluster_barrier = {static_cast<int>(threads) * cluster};
  size_t used = 0;
  for (int rank = 0; rank < cluster; ++rank) {
    blocks.push_back(std::make_unique<Block>());
    Block& b = *blocks.back();
    b.index = dim3(first + rank, y);
    b.rank = rank;
    b.shared.assign(shared_bytes, kPoison);
    b.barrier.expected = static_cast<int>(threads);
    for (unsigned t = 0; t < threads; ++t) {
      if (t % kWarp == 0) {
        warps.push_back(std::make_unique<Warp>());
        warps.back()->barrier.expected = kWarp;
      }
      if (used == pool.size()) pool.push_back(std::make_unique<Fiber>());
      Fiber& f = *pool[used++];
      f.thread = t;
      f.block = &b;
      f.warp = warps.back().get();
      f.exchanges = 0;
      f.waiting = nullptr;
      f.done = false;
      f.groups.clear();
      f.open.clear();
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = kStack;
      f.context.uc_link = nullptr;
      makecontext(&f.context, entry, 0);
    }
  }
  return used;
}

// One turn of every fiber that can go on; how many are done now.
size_t turn(std::vector<std::unique_ptr<Fiber>>& pool, size_t used) {
  size_t finished = 0;
  bool progress = false;
  for (size_t i = 0; i < used; ++i) {
    current = pool[i].get();
    if (!current->done &&
        !(current->waiting && current->waiting->generation == current->generation)) {
      current->waiting = nullptr;
      threadIdx = dim3(current->thread);
      blockIdx = current->block->index;
      swapcontext(&scheduler, &current->context);
      progress = true;
    }
    finished += pool[i]->done;
  }
  if (!progress && finished < used) {
    std::fprintf(stderr, "deadlock: some threads wait at a barrier that others passed by\n");
    std::abort();
  }
  return finished;
}

}  // namespace

void launch(dim3 grid, dim3 block, int cluster, size_t shared_bytes,
            const std::function<void()>& thread) {
  static std::vector<std::unique_ptr<Fiber>> pool;
  gridDim = grid;
  body = &thread;
  for (unsigned y = 0; y < grid.y; ++y) {
    const unsigned clusters = grid.x / cluster, odd = clusters / 2;
    for (unsigned i = 0; i < clusters; ++i) {
      const unsigned next = machine.order == Machine::kBackwards  ? clusters - 1 - i
                            : machine.order == Machine::kForwards ? i
                            : i < odd                             ? 2 * i + 1
                                                                  : 2 * (i - odd);
      const unsigned first = next * cluster;
      std::vector<std::unique_ptr<Warp>> warps;
      const size_t used = prepare(pool, warps, first, y, block.x, cluster, shared_bytes);
      while (turn(pool, used) < used) {
      }
    }
  }
}

}  // namespace emulator
