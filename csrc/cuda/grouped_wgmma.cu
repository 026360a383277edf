// Grouped GEMM for up to some hundred rows a group and packed weights, on Hopper's warpgroup tensor
// cores: reads the 4-bit weights once for every 64 rows of a group, decodes them in registers.
//
// - A block makes tiles of 256 weight rows x kTileM rows of A, 256 along k at a time. Two threads
//   start copies of boxes, two warpgroups multiply: 128 weight rows each, as two wgmma of
//   64 x kN x 16 per 16 of k, where kN <= kTileM is what the tile's rows need. The copies run ahead
//   across tiles. A warp of its own plans: it looks for tiles, and the others read what it found.
// - A's rows are arranged by another kernel (grouped_unpack.cu), which lets this one start at once:
//   a block of that fits beside one of these, in the registers that these leave. So the pass costs
//   the time of the first rows. Where they are few it is over before the first tile is planned, and
//   this kernel waits for it.
// - At the start all comes from far, instructions too: 600 MB of weights have passed through L2
//   since the kernel before. The planner's code is short therefore, and weights leave L2 first.
// - Where groups differ, blocks share tiles, so that all are done at the same time
//   (grouped_shares.cuh).
// - Nothing may be spilled: with this much shared memory hardly any L1 is left, and a spilled word
//   takes a microsecond to come back from L2 while copies are under way.
// - Weights are wgmma's register operand: each thread decodes the codes its fragments need while
//   the tensor cores work on the ones before. Lane (g, t) has four rows, 32 apart, whose scales for
//   64 of k are 16 consecutive bytes of the 128x4 layout, and of every 128 of k the 32 from 32 t
//   on: 16 bytes of codes. What k stands where in the product is free, as long as both sides agree:
//   A's rows have been brought into that order (grouped_unpack.cu).
// - Codes lie in shared memory as the copy swizzled them, vector v of row r in place v ^ r % 8. The
//   rows of lanes g and g + 1 differ by 4 of 8: a quarter of a warp reaches all banks.
// - Sums are FP32 in a fixed order: the same bytes in every run. A NaN scale of row n reaches row n
//   of B's products only.
#include "decode.cuh"
#include "grouped_ring.cuh"
#include "grouped_wgmma_results.cuh"

namespace nvfp4::cuda {
namespace {

// What the planning warp says of a piece, whose place is free.
template <int kTileM>
__device__ __forceinline__ void describe(const GroupedGemmParams& p, const TilePiece& piece,
                                         uint32_t number, int lane, Tile<kTileM>& out) {
  const GroupedTile& tile = piece.tile;
#pragma unroll 1
  for (int i = lane; i < kTileM; i += kWarpSize) {
    const int64_t m = tile.row + i;
    const int64_t to = i < tile.rows ? target_row(p, m) : kDropped;
    const bool missing = to >= 0 && source_row(p, m) < 0;
    out.target[i] = static_cast<int>(missing ? kMissing - to : to);
    out.gamma[i] = p.gamma && i < tile.rows ? p.gamma[m] : 1.0f;
  }
#pragma unroll 1
  for (int i = lane; i < kTileN; i += kWarpSize) out.bias[i] = 0.0f;
  if (p.bias) {
#pragma unroll 2
    for (int i = lane; i < kTileN; i += kWarpSize) {
      const int64_t n = tile.n + i;
      if (n < p.n) out.bias[i] = load_as_float(p.bias, p.bias_type, tile.group * p.n + n);
    }
  }
  if (lane != 0) return;
  out.group = tile.group;
  out.row = tile.row;
  out.n = tile.n;
  out.rows = tile.rows;
  out.begin = piece.begin;
  out.end = piece.end;
  out.meets = piece.meets;
  out.number = number;
  out.alpha = group_alpha(p, tile.group);
}

// The planning warp: finds the block's pieces, some ahead.
template <int kTileM>
__device__ __forceinline__ void plan_pieces(const WgmmaArgs& args, Memory<kTileM>* memory,
                                            Addresses<kTileM> at, int lane) {
  const GroupedGemmParams& p = args.gemm;
  using WarpSchedule = Schedule<kWarpSize, kTileM, kTileN, NamedBarrier<kPlanner, kWarpSize>,
                                kNoStrips, TileLengths<kTileM>>;
  WarpSchedule schedule(p, &memory->schedule, lane, window_of(args.part));
  Shares<WarpSchedule> shares(schedule, args.steps, lane);
  TilePiece piece;
  for (uint32_t number = 0;; ++number) {
    const bool found = shares.next(piece);
    const uint32_t place = number % kTiles;
    Tile<kTileM>& tile = memory->tiles[place];
    barrier_wait(at.finished(place), number / kTiles % 2 ^ 1);
    if (found) {
      describe<kTileM>(p, piece, number, lane, tile);
    } else if (lane == 0) {
      tile.rows = 0;
      tile.row = schedule.rows_end();
    }
    barrier_arrive(at.described(place));
    if (!found) break;
  }
  wait_for_kernel_ahead();  // it has nothing to do any more, but must be over
}

// Weights, which are there. Where A's rows are made ahead and hence few, they wait for those.
struct Given {
  __device__ Given(const ArrangedA& a, int) {
    if (a.rounds == nullptr) wait_for_kernel_ahead();
  }
  __device__ void wait_for(int64_t) const {}
};

// A's rows, made ahead or at this time. For a warp.
class RowsInTheMaking {
 public:
  __device__ RowsInTheMaking(const ArrangedA& a, int lane) : a_(a), lane_(lane) {
    if (a.rounds) return;
    wait_for_kernel_ahead();
    steps_ = ~0u;
  }

  // Until the part's first `rows` are there for copies.
  __device__ void wait_for(int64_t rows) {
    const auto steps = static_cast<uint32_t>(rows) * a_.steps_per_row;
    if (steps <= steps_) return;
    while (steps > steps_) {
      uint32_t rounds = ~0u;
#pragma unroll 4
      for (unsigned i = lane_; i < a_.blocks; i += kWarpSize) {
        rounds = min(rounds, load_relaxed(a_.rounds + i));
      }
      for (int distance = kWarpSize / 2; distance; distance /= 2) {
        rounds = min(rounds, __shfl_xor_sync(kFullWarp, rounds, distance));
      }
      steps_ = rounds * a_.steps_per_round;
    }
    fence_device();
    __syncwarp();
    fence_async_proxy();
  }

 private:
  const ArrangedA& a_;
  const int lane_;
  uint32_t steps_ = 0;  // that are made
};

// A step's copies to a stage, whose barrier hears of them: of weights and their scales, of A.
template <int kTileM>
class WeightCopies {
 public:
  using Source = Given;

  __device__ WeightCopies(const WgmmaArgs& args, const Tile<kTileM>& tile)
      : args_(args), row_(static_cast<int>(tile.group * args.gemm.n + tile.n)) {
    const GroupedGemmParams& p = args.gemm;
    for (int i = 0; i < kMultipliers; ++i) {
      // Beyond the last row the last tile again: results are dropped.
      const int64_t scale_tile = min(tile.n / kTileRows + i, (p.n - 1) / kTileRows);
      scales_[i] =
          p.b.scale + tile.group * args.scale_stack + scale_tile * args.tiles_per_row * kTileBytes;
    }
  }
  __device__ void start(int step, uint32_t stage, uint32_t arrived) const {
    const int64_t left = args_.tiles_per_row - int64_t{step} * kStepTiles;
    const auto scale_bytes = static_cast<uint32_t>(min(left, int64_t{kStepTiles})) * kTileBytes;
    barrier_expect(arrived, kCodeBytes + kMultipliers * scale_bytes);
    copy_box<true>(stage, args_.codes, step * kBoxBytes, row_, arrived);
    uint32_t target = stage + kCodeBytes + kBoxes * kTileM * kBoxBytes;
    for (int i = 0; i < kMultipliers; ++i, target += kScaleBytes) {
      copy_bulk<true>(target, scales_[i] + int64_t{step} * kScaleBytes, scale_bytes, arrived);
    }
  }

 private:
  const WgmmaArgs& args_;
  int row_;
  const uint8_t* scales_[kMultipliers];
};

template <int kTileM>
class RowCopies {
 public:
  using Source = RowsInTheMaking;

  __device__ RowCopies(const WgmmaArgs& args, const Tile<kTileM>& tile)
      : args_(args),
        row_(static_cast<int>(tile.row - window_of(args.part).begin)),
        size_((tile.rows - 1) / kRowUnit<kTileM>) {}
  __device__ void start(int step, uint32_t stage, uint32_t arrived) const {
    const auto box_bytes = static_cast<uint32_t>(size_ + 1) * kRowUnit<kTileM> * kBoxBytes;
    barrier_expect(arrived, kBoxes * box_bytes);
    uint32_t target = stage + kCodeBytes;
    for (int i = 0; i < kBoxes; ++i, target += kTileM * kBoxBytes) {
      copy_box(target, args_.a[size_], step * kStepK + i * kBoxK, row_, arrived);
    }
  }

 private:
  const WgmmaArgs& args_;
  int row_, size_;
};

// A warp of each kind, whose first lane starts its copies of all pieces' steps, each as soon as its
// stage is free.
template <typename Copies, int kTileM>
__device__ __forceinline__ void copy_pieces(const WgmmaArgs& args, const Memory<kTileM>* memory,
                                            Addresses<kTileM> at, int lane) {
  Place<kStages<kTileM>> place;
  Place<kTiles> tile_place;
  typename Copies::Source source(args.arranged, lane);
  for (;; tile_place.next()) {
    const Tile<kTileM>& tile = memory->tiles[tile_place.stage];
    int64_t rows = 0;  // of the part, up to the last one of the piece
    if (lane == 0) {
      barrier_wait(at.described(tile_place.stage), tile_place.parity);
      if (tile.rows) rows = tile.row - window_of(args.part).begin + tile.rows;
    }
    rows = __shfl_sync(kFullWarp, rows, 0);
    if (rows == 0) return;
    source.wait_for(rows);
    if (lane != 0) continue;
    const Copies copies(args, tile);
    const int end = tile.end;
#pragma unroll 1
    for (int step = tile.begin; step < end; ++step, place.next()) {
      barrier_wait(at.empty(place.stage), place.parity ^ 1);
      copies.start(step, at.stage(place.stage), at.full(place.stage));
    }
    barrier_arrive(at.finished(tile_place.stage));
  }
}

// Where a warpgroup is in the ring.
template <int kTileM>
struct Ring {
  Addresses<kTileM> at;
  Place<kStages<kTileM>> place;

  __device__ __forceinline__ uint32_t stage() const { return at.stage(place.stage); }
  __device__ __forceinline__ uint64_t a() const {
    // All lanes have the same: said in this way, so that it stays in uniform registers.
    return wgmma_descriptor_of(
        __shfl_sync(kFullWarp, wgmma_descriptor_low(stage() + kCodeBytes), 0));
  }
  __device__ __forceinline__ void wait() const { barrier_wait(at.full(place.stage), place.parity); }
};

// 16 bytes of codes of each of a lane's rows: half a step.
struct Codes {
  uint32_t words[kRowsPerLane][4];
};

__device__ __forceinline__ void load_codes(Codes& half, uint32_t codes, int q, const Lane& lane) {
  const uint32_t from =
      codes + static_cast<uint32_t>((4 * q + lane.t) ^ lane.swizzle) * kVectorBytes;
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const uint4 v = load_shared(from + j * 32 * kBoxBytes);
    half.words[j][0] = v.x;
    half.words[j][1] = v.y;
    half.words[j][2] = v.z;
    half.words[j][3] = v.w;
  }
}

// A step's four scales of each of a lane's rows, two of either half.
struct Scales {
  uint32_t four[kRowsPerLane];
};

__device__ __forceinline__ void load_scales(Scales& scales, uint32_t from, int t, int blocks_left) {
  const uint4 first = load_shared(from), second = load_shared(from + 2 * kTileBytes);
  const uint32_t selector = t & 1 ? 0x7632 : 0x5410;
  scales.four[0] = permute_bytes(first.x, second.x, selector);
  scales.four[1] = permute_bytes(first.y, second.y, selector);
  scales.four[2] = permute_bytes(first.z, second.z, selector);
  scales.four[3] = permute_bytes(first.w, second.w, selector);
  if (blocks_left < kStepBlocks) {  // the row's end: padding counts as 0 whatever it is
    uint32_t mask = 0;
    for (int i = 0; i < 4; ++i) {
      const int block = i / 2 * (kHalfK / kBlockSize) + 2 * t + i % 2;
      if (block < blocks_left) mask |= 0xFFu << (8 * i);
    }
#pragma unroll
    for (int j = 0; j < kRowsPerLane; ++j) scales.four[j] &= mask;
  }
}

// Word kWord of a half: while it is decoded, the tensor cores have the one before; when this is
// over, only this one.
template <typename T, int kTileM, int kWord, int kCount>
__device__ __forceinline__ void decode_and_multiply(Codes& half,
                                                    const uint32_t (&scale)[kRowsPerLane][2],
                                                    uint32_t (&fragment)[kFragments][2][2][4],
                                                    uint64_t a, int q, float (&low)[kCount],
                                                    float (&high)[kCount]) {
  auto& mine = fragment[kWord % kFragments];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    // Not sooner: the tensor cores are to have work while this word is decoded.
    pin_register(half.words[j][kWord]);
    uint32_t pairs[4];
    decode8_split<T>(half.words[j][kWord], scale[j][kWord / 2], pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[j / 2][i / 2][2 * (i % 2) + j % 2] = pairs[i];
  }
  wgmma_fence();
  a += (2 * q + kWord / 2) * (kTileM * kBoxBytes / kVectorBytes) + kWord % 2 * 4;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    wgmma(low, mine[0][s], a + 2 * s, T{});
    wgmma(high, mine[1][s], a + 2 * s, T{});
  }
  wgmma_commit();
  wgmma_wait<1>();
}

// The first of them.
template <int kCount>
using Sums = float[kCount];
template <int kCount, int kAll>
__device__ __forceinline__ Sums<kCount>& first_of(Sums<kAll>& all) {
  return reinterpret_cast<Sums<kCount>&>(all);
}

// The products of a piece of at most kN rows, whose first step is there.
template <typename T, int kN, int kTileM>
__device__ __forceinline__ void multiply_steps(const WgmmaArgs& args, const Tile<kTileM>& tile,
                                               const Lane& lane, Ring<kTileM>& ring,
                                               float (&acc)[2][kTileM / 2]) {
  auto& low = first_of<kN / 2>(acc[0]);
  auto& high = first_of<kN / 2>(acc[1]);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) low[i] = high[i] = 0.0f;
  const uint32_t my_codes = static_cast<uint32_t>(lane.group * kGroupRows + lane.first) * kBoxBytes;
  const uint32_t my_scales =
      kCodeBytes + kBoxes * kTileM * kBoxBytes + static_cast<uint32_t>(lane.group) * kScaleBytes +
      static_cast<uint32_t>(lane.t / 2) * kTileBytes + lane.first * kVectorBytes;
  uint32_t fragment[kFragments][2][2][4];  // pair of rows, 16 of k, registers
  const int steps = tile.end - tile.begin;
  int blocks_left = static_cast<int>(args.gemm.k / kBlockSize) - tile.begin * kStepBlocks;
  Codes halves[kStepHalves];
  Scales scales;
  load_codes(halves[0], ring.stage() + my_codes, 0, lane);
  load_scales(scales, ring.stage() + my_scales, lane.t, blocks_left);
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    const int stage = ring.place.stage;
    const Scales now = scales;
    const uint64_t a = ring.a();
#pragma unroll
    for (int q = 0; q < kStepHalves; ++q) {
      uint32_t scale[kRowsPerLane][2];
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        scale_pairs(now.four[j] >> (16 * q), scale[j], T{});
      }
      decode_and_multiply<T, kTileM, 0>(halves[q], scale, fragment, a, q, low, high);
      if (q == 0 && step > 0) barrier_arrive(ring.at.empty(before));
      decode_and_multiply<T, kTileM, 1>(halves[q], scale, fragment, a, q, low, high);
      // What comes next is on its way while the rest is worked on; sooner, it would take registers.
      if (q == 0) {
        load_codes(halves[1], ring.stage() + my_codes, 1, lane);
      } else {
        ring.place.next();
        if (step + 1 < steps) {
          blocks_left -= kStepBlocks;
          ring.wait();
          load_codes(halves[0], ring.stage() + my_codes, 0, lane);
          load_scales(scales, ring.stage() + my_scales, lane.t, blocks_left);
        }
      }
      decode_and_multiply<T, kTileM, 2>(halves[q], scale, fragment, a, q, low, high);
      decode_and_multiply<T, kTileM, 3>(halves[q], scale, fragment, a, q, low, high);
    }
    before = stage;
  }
  wgmma_wait<0>();
  pin_registers(low);
  pin_registers(high);
  barrier_arrive(ring.at.empty(before));
}

// By the fewest rows that will do. (More than four sizes, and ptxas runs out of registers.)
template <typename T, int kTileM, int kN = kTileM>
__device__ __forceinline__ void multiply(const WgmmaArgs& args, const Tile<kTileM>& tile,
                                         const Lane& lane, Ring<kTileM>& ring,
                                         float (&acc)[2][kTileM / 2]) {
  if constexpr (kN > kRowUnit<kTileM>) {
    constexpr int kFewer = kN - kRowUnit<kTileM>;
    if (tile.rows <= kFewer) return multiply<T, kTileM, kFewer>(args, tile, lane, ring, acc);
  }
  multiply_steps<T, kN>(args, tile, lane, ring, acc);
}

template <typename T, int kTileM>
__device__ __forceinline__ void multiply_tiles(const WgmmaArgs& args, const Memory<kTileM>* memory,
                                               Addresses<kTileM> at, int thread) {
  const GroupedGemmParams& p = args.gemm;
  const Lane lane(thread);
  Ring<kTileM> ring{at, {}};
  for (uint32_t number = 0;;) {
    const uint32_t place = number % kTiles;
    barrier_wait(at.described(place), number / kTiles % 2);
    const Tile<kTileM>& tile = memory->tiles[place];
    if (tile.rows == 0) {
      if (!p.scatter) {
        const int64_t end = window_of(args.part).end;
        zero_rows(p, tile.row, end, kMultipliers * kGroupThreads, thread, args.wide);
      }
      return;
    }
    ring.wait();
    float acc[2][kTileM / 2];
    multiply<T, kTileM>(args, tile, lane, ring, acc);
    if (tile.meets == kWholeTile || meet(args, tile, lane, acc)) {
      switch (p.out_type) {
        case DType::kFloat32:
          finish<T, float>(args, tile, lane, at, acc);
          break;
        case DType::kBFloat16:
          finish<T, __nv_bfloat16>(args, tile, lane, at, acc);
          break;
        case DType::kFloat16:
          finish<T, __half>(args, tile, lane, at, acc);
          break;
      }
    }
    number = tile.number + 1;  // kept in a register it would be spilled
    barrier_arrive(at.finished((number - 1) % kTiles));
  }
}

template <typename T, int kTileM>
__global__ void __maxnreg__(kLaunchRegisters)
    grouped_wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
  if (NVFP4_WGMMA) {  // else an empty kernel: see kHasHopperKernels
    uint8_t* const shared = dynamic_shared();
    const Addresses<kTileM> at{(shared_address(shared) + 1023u) & ~1023u};
    auto* const memory = reinterpret_cast<Memory<kTileM>*>(
        shared + (at.ring - shared_address(shared)) + Addresses<kTileM>::kMemory);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == kWarpSize) {
      prefetch_map(args.codes);
      for (int i = 0; i < kSizes<kTileM>; ++i) prefetch_map(args.a[i]);
    }
    if (thread == 0) {
      for (int i = 0; i < kStages<kTileM>; ++i) {
        barrier_init(at.full(i), kCopiers);
        barrier_init(at.empty(i), kMultipliers * kGroupThreads);
      }
      for (int i = 0; i < kTiles; ++i) {
        barrier_init(at.described(i), kWarpSize);
        barrier_init(at.finished(i), kMultipliers * kGroupThreads + kCopiers);
      }
      fence_barrier_init();
    }
    __syncthreads();
    if (thread < kGroupThreads) {
      give_registers<kCopierRegisters>();
      const int warp = thread / kWarpSize, lane = thread % kWarpSize;
      if (warp == 0) {
        plan_pieces<kTileM>(args, memory, at, lane);
      } else if (warp == 1) {
        copy_pieces<WeightCopies<kTileM>>(args, memory, at, lane);
      } else if (warp == 2) {
        copy_pieces<RowCopies<kTileM>>(args, memory, at, lane);
      }
    } else {
      take_registers<kMultiplierRegisters>();
      multiply_tiles<T, kTileM>(args, memory, at, thread - kGroupThreads);
    }
  }
}

// ------------------------------------------------------------------------------------------- host

using Kernel = void (*)(const WgmmaArgs);

template <int kTileM>
void run(const GroupedGemmParams& p, const GroupedPart& part, const ArrangedA& a, Stream stream) {
  WgmmaArgs args = {};
  args.codes = tensor_map(p.b.data, 1, p.groups * p.n, p.k / 2, p.k / 2, kTileN, true);
  for (int i = 0; i < kSizes<kTileM>; ++i) {
    args.a[i] = tensor_map(a.rows, 2, std::min(part.rows, p.m), a.pitch, a.pitch * 2,
                           (i + 1) * kRowUnit<kTileM>);
  }
  args.gemm = p;
  args.part = part;
  args.arranged = a;
  args.steps = static_cast<int>(ceil_div(p.k, kStepK));
  args.tiles_per_row = ceil_div(p.k / kBlockSize, kTileCols);
  args.scale_stack = ceil_div(p.n, kTileRows) * args.tiles_per_row * kTileBytes;
  args.wide = wide_stores(p);
  constexpr size_t kBytes = 1024 + Addresses<kTileM>::kMemory + sizeof(Memory<kTileM>);
  static_assert(kBytes <= 226 * 1024);  // 1 KB is each block's, and two are to fit
  const Kernel kernel = a.type == DType::kFloat16 ? grouped_wgmma_kernel<__half, kTileM>
                                                  : grouped_wgmma_kernel<__nv_bfloat16, kTileM>;
  launch_persistent("grouped_gemm (wgmma)", kernel, most_items(p, kTileM, kTileN), kThreads, kBytes,
                    1, stream, args, 1, true);
}

constexpr int64_t kSmallTileRows = 16, kLargeTileRows = 64;

}  // namespace

// A few rows are made sooner than the first tile is planned.
bool grouped_wgmma_overlaps(int64_t rows) { return rows > kSmallTileRows; }

int64_t grouped_wgmma_cuts() { return (current_device().sm_count + 1) * kMultiplierWarps; }

int64_t grouped_wgmma_sums_bytes(int64_t rows) {
  const int64_t tile = rows <= kSmallTileRows ? kSmallTileRows : kLargeTileRows;
  return grouped_wgmma_cuts() / kMultiplierWarps * 2 * kTileN * tile * 4;
}

void grouped_wgmma(const GroupedGemmParams& p, const GroupedPart& part, const ArrangedA& a,
                   int64_t rows, Stream stream) {
  if (rows <= kSmallTileRows) return run<kSmallTileRows>(p, part, a, stream);
  run<kLargeTileRows>(p, part, a, stream);
}

}  // namespace nvfp4::cuda
