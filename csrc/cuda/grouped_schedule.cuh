// What the grouped kernels share: which tile a block works on next, and how a tile is written.
//
// Blocks are persistent: block b takes items b, b + grid, b + 2 grid, ... of the list
//   for each group, for each strip of tiles of m, for each tile of n, for each tile of m
// whose length only the device knows. A block keeps the running number of tiles of a window of
// groups in shared memory and moves it forward as its items ask for later groups, so the number of
// groups is not limited and costs no workspace. Where tiles of fewer rows take less time, it keeps
// the running length of a line of them, too: see grouped_shares.cuh.
#pragma once

#include "common.cuh"
#include "grouped_gemm.h"

namespace nvfp4::cuda {

constexpr int kWindow = 512;  // groups whose prefix sums are in shared memory

// One tile of one group: rows [row, row + rows) of the problem, columns from n on, k in
// [k_begin, k_end).
struct GroupedTile {
  int64_t group, row, n, k_begin, k_end;
  int rows;
};

// Where tiles lie on a line, one behind the other, each as long as it takes.
struct OnLine {
  int begin, length;
};
// All take the same.
struct EvenTiles {
  static constexpr int kWhole = 1;  // a tile of all rows
  __device__ __forceinline__ static int of(int) { return 1; }
};

template <int kThreads, typename Lengths = EvenTiles>
struct ScheduleMemory;
template <int kThreads>
struct ScheduleMemory<kThreads, EvenTiles> {
  int ends[kWindow];   // last row of the group, exclusive
  int tiles[kWindow];  // tiles along m of the window's groups up to and with this one
  int scan[2][kThreads];

  __device__ int* lengths() { return tiles; }
};
template <int kThreads, typename Lengths>
struct ScheduleMemory : ScheduleMemory<kThreads, EvenTiles> {
  int of_tiles[kWindow];

  __device__ int* lengths() { return of_tiles; }  // of those tiles together
};

struct BlockBarrier {
  __device__ __forceinline__ static void sync() { __syncthreads(); }
};

constexpr int kNoStrips = 1 << 30;

// Rows [begin, end) of the problem: what is outside is left out.
struct RowWindow {
  int64_t begin, end;
};

__device__ __forceinline__ RowWindow window_of(const GroupedPart& part) {
  if (part.ends == nullptr) return {part.row_begin, part.row_begin + part.rows};
  const int64_t last = part.ends[part.first_group + part.groups];
  const int64_t begin = min(part.ends[part.first_group] + part.row_begin, last);
  return {begin, min(begin + part.rows, last)};
}

// For `kThreads` threads, `thread` among them, which Barrier brings together. kStrip: tiles of m a
// strip, so that tiles made at the same time share rows of both sides.
template <int kThreads, int kTileM, int kTileN, typename Barrier = BlockBarrier,
          int kStrip = kNoStrips, typename Lengths = EvenTiles>
class Schedule {
 public:
  using Memory = ScheduleMemory<kThreads, Lengths>;
  static constexpr bool kEven = std::is_same_v<Lengths, EvenTiles>;

  __device__ Schedule(const GroupedGemmParams& p, Memory* memory, int thread)
      : Schedule(p, memory, thread, RowWindow{0, p.m}) {}

  __device__ Schedule(const GroupedGemmParams& p, Memory* memory, int thread, RowWindow window)
      : p_(p),
        memory_(memory),
        thread_(thread),
        tiles_n_(static_cast<int>((p.n + kTileN - 1) / kTileN)),
        rows_end_(static_cast<int>(window.end)),
        rows_before_(static_cast<int>(window.begin)) {
    if (!p.ragged_k && p.groups > 0) load_window();
  }

  // Item `index`; indices never decrease from call to call, and all threads ask together. False
  // after the last one.
  __device__ bool find(int64_t index, GroupedTile& tile) {
    if (p_.ragged_k) return find_slice(index, tile);
    if (p_.groups == 0) return false;
    while (index >= int64_t{tiles_before_ + memory_->tiles[count_ - 1]} * tiles_n_) {
      if (first_ + count_ >= p_.groups) return false;
      first_ += count_;
      tiles_before_ += memory_->tiles[count_ - 1];
      rows_before_ = memory_->ends[count_ - 1];
      load_window();
    }
    find_place(index - int64_t{tiles_before_} * tiles_n_, memory_->tiles, tile);
    return true;
  }

  // Whether all groups are in the window and the line is short enough for what follows.
  __device__ bool one_window() const {
    return !p_.ragged_k && p_.groups <= kWindow && window_sum(lengths()) < (int64_t{1} << 31);
  }
  __device__ int items() const { return static_cast<int>(window_sum(memory_->tiles)); }
  __device__ int line() const { return static_cast<int>(window_sum(lengths())); }
  // Where item `index` begins on the line; any that there is, or one beyond. For any thread alone.
  __device__ int line_begin(int index) const {
    if (index >= items()) return line();
    GroupedTile tile;
    return find_in_window(index, true, tile).begin;
  }
  __device__ int longest() const { return longest_; }  // of the line's tiles
  // Item `at`, or the tile that has place `at` of the line; there is one.
  __device__ OnLine find_in_window(int at, bool item, GroupedTile& tile) const {
    return find_place(at, item ? memory_->tiles : lengths(), tile);
  }

  // Where the window's rows that no group has begin. Only after find() gave false, or in one
  // window.
  __device__ int64_t rows_end() const { return count_ ? memory_->ends[count_ - 1] : rows_before_; }

 private:
  __device__ const int* lengths() const { return memory_->lengths(); }
  __device__ int64_t window_sum(const int* upto) const {
    return count_ ? int64_t{upto[count_ - 1]} * tiles_n_ : 0;
  }

  // The tile at `local`, counted in what `upto` has sums of: tiles or their lengths.
  template <typename Int>
  __device__ OnLine find_place(Int local, const int* upto, GroupedTile& tile) const {
    const Int tiles_n = static_cast<Int>(tiles_n_);
    int low = 0, high = count_ - 1;  // the first group that ends beyond `local`
    while (low < high) {
      const int middle = (low + high) / 2;
      if (upto[middle] * tiles_n > local) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const auto before = [&](const int* sums) { return low ? sums[low - 1] : 0; };
    const int begin = low ? memory_->ends[low - 1] : rows_before_;
    const int tiles = memory_->tiles[low] - before(memory_->tiles);
    const int each = upto == memory_->tiles ? 1 : Lengths::kWhole;  // the group's last may be less
    Int in_group = local - before(upto) * tiles_n;
    int strip = 0, width = upto[low] - before(upto);  // of a column of tiles
    static_assert(kStrip == kNoStrips || kEven);
    if (kStrip != kNoStrips && kStrip < tiles) {
      strip = static_cast<int>(in_group / (kStrip * tiles_n)) * kStrip;
      in_group -= strip * tiles_n;
      width = min(kStrip, tiles - strip);
    }
    const int n_tile = static_cast<int>(in_group / width);
    const int in_column = static_cast<int>(in_group - Int{n_tile} * width);
    const int m_tile = strip + min(in_column / each, tiles - 1 - strip);
    tile.group = first_ + low;
    tile.row = begin + int64_t{m_tile} * kTileM;
    tile.rows = static_cast<int>(min(int64_t{kTileM}, memory_->ends[low] - tile.row));
    tile.n = int64_t{n_tile} * kTileN;
    tile.k_begin = 0;
    tile.k_end = p_.k;
    const int length = lengths()[low] - before(lengths());
    return {before(lengths()) * tiles_n_ + n_tile * length + m_tile * Lengths::kWhole,
            Lengths::of(tile.rows)};
  }

  __device__ bool find_slice(int64_t index, GroupedTile& tile) {
    const int64_t tiles_m = (p_.m + kTileM - 1) / kTileM, of_group = tiles_m * tiles_n_;
    if (index >= of_group * p_.groups) return false;
    const int64_t in_group = index % of_group;
    const auto offset = [&](int64_t e) {
      const int64_t at = e < 0 ? 0 : p_.offs[e];
      return min(max(at, int64_t{0}), p_.k) / kBlockSize * kBlockSize;
    };
    tile.group = index / of_group;
    tile.row = in_group % tiles_m * kTileM;
    tile.rows = static_cast<int>(min(int64_t{kTileM}, p_.m - tile.row));
    tile.n = in_group / tiles_m * kTileN;
    tile.k_begin = offset(tile.group - 1);
    tile.k_end = max(offset(tile.group), tile.k_begin);
    if (p_.stale_padding) {
      tile.k_end = min(round_up(tile.k_end, int64_t{kTileCols * kBlockSize}), p_.k);
    }
    return true;
  }

  // Of the threads before this one, together; `none` where there is none.
  template <typename Combine>
  __device__ int before_this(int value, int none, Combine combine) {
    const int t = thread_;
    if constexpr (kThreads == kWarpSize) {
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int other = __shfl_sync(kFullWarp, value, max(t - distance, 0));
        if (t >= distance) value = combine(other, value);
      }
      const int before = __shfl_sync(kFullWarp, value, max(t - 1, 0));
      return t ? before : none;
    } else {
      int side = 0;
      memory_->scan[0][t] = value;
      Barrier::sync();
      for (int distance = 1; distance < kThreads; distance *= 2, side ^= 1) {
        value = memory_->scan[side][t];
        if (t >= distance) value = combine(memory_->scan[side][t - distance], value);
        memory_->scan[side ^ 1][t] = value;
        Barrier::sync();
      }
      const int before = t ? memory_->scan[side][t - 1] : none;
      Barrier::sync();
      return before;
    }
  }

  __device__ void load_window() {
    count_ = static_cast<int>(min(int64_t{kWindow}, p_.groups - first_));
    const int each = (count_ + kThreads - 1) / kThreads;  // consecutive groups of a thread
    const int from = thread_ * each;
    const int here = min(each, count_ - from);  // may be negative
    Barrier::sync();                            // everyone is done with the window before
    int running = rows_before_;
#pragma unroll 2
    for (int i = 0; i < here; ++i) {
      const int end = __ldg(p_.offs + first_ + from + i);
      memory_->ends[from + i] = end;
      running = max(running, min(end, rows_end_));
    }
    int begin = before_this(running, rows_before_, [](int a, int b) { return max(a, b); });
    int count = 0, length = 0, longest = 0;
#pragma unroll 1
    for (int i = 0; i < here; ++i) {
      const int end = max(begin, min(memory_->ends[from + i], rows_end_));
      const int tiles = (end - begin + kTileM - 1) / kTileM;
      count += tiles;
      if (!kEven && tiles) {
        const int last = Lengths::of(end - begin - (tiles - 1) * kTileM);
        length += (tiles - 1) * Lengths::kWhole + last;
        longest = max(longest, tiles > 1 ? Lengths::kWhole : last);
      }
      memory_->ends[from + i] = end;
      memory_->tiles[from + i] = count;
      if (!kEven) memory_->lengths()[from + i] = length;
      begin = end;
    }
    const auto sum = [](int a, int b) { return a + b; };
    const int tiles_before = before_this(count, 0, sum);
    const int length_before = kEven ? 0 : before_this(length, 0, sum);
    if constexpr (!kEven) {
      static_assert(kThreads == kWarpSize);
      auto most = static_cast<uint32_t>(longest);
      for (int distance = kWarpSize / 2; distance; distance /= 2) {
        most = max(most, __shfl_xor_sync(kFullWarp, most, distance));
      }
      longest_ = static_cast<int>(most);
    }
#pragma unroll 1
    for (int i = 0; i < here; ++i) {
      memory_->tiles[from + i] += tiles_before;
      if (!kEven) memory_->lengths()[from + i] += length_before;
    }
    Barrier::sync();
  }

  const GroupedGemmParams& p_;
  Memory* const memory_;
  const int thread_;
  const int tiles_n_, rows_end_;  // m, as offsets, has 31 bits
  int rows_before_;
  int first_ = 0;         // the window's first group
  int tiles_before_ = 0;  // at most a tile a row
  int count_ = 0, longest_ = Lengths::kWhole;
};

// At most as many items as there can be, for the size of the grid.
inline int64_t most_items(const GroupedGemmParams& p, int64_t tile_m, int64_t tile_n) {
  const int64_t tiles_n = ceil_div(p.n, tile_n);
  if (p.ragged_k) return p.groups * ceil_div(p.m, tile_m) * tiles_n;
  return (p.m / tile_m + std::min(p.groups, p.m)) * tiles_n;
}

// The problem's row i comes from this row of A; -1 where it is out of range: its result is zero.
__device__ __forceinline__ int64_t source_row(const GroupedGemmParams& p, int64_t i) {
  const int64_t row = p.gather ? p.gather[i] : i;
  return row >= 0 && row < p.a_rows ? row : -1;
}

// And goes to this row of out's (m, n); -1 where it is dropped.
__device__ __forceinline__ int64_t target_row(const GroupedGemmParams& p, int64_t i) {
  const int64_t row = p.scatter ? p.scatter[i] : i;
  return row >= 0 && row < p.m ? row : -1;
}

__device__ __forceinline__ float group_alpha(const GroupedGemmParams& p, int64_t group) {
  return p.group_alpha ? p.group_alpha[group] : load_scalar(p.alpha);
}

template <typename Out>
__device__ __forceinline__ uint32_t bits_of(Out v) {
  uint32_t bits = 0;
  memcpy(&bits, &v, sizeof(v));
  return bits;
}

// Eight results of one row to out[index] on, of which `count` exist. kWide: 16-byte stores may be
// used where all eight exist.
template <typename Out>
__device__ __forceinline__ void store_eight(Out* out, const float (&v)[8], int count, bool wide) {
  if (wide && count == 8) {
    if constexpr (sizeof(Out) == 4) {
      uint4* target = reinterpret_cast<uint4*>(out);
      for (int h = 0; h < 2; ++h) {
        target[h] = make_uint4(
            bits_of(from_float<Out>(v[4 * h])), bits_of(from_float<Out>(v[4 * h + 1])),
            bits_of(from_float<Out>(v[4 * h + 2])), bits_of(from_float<Out>(v[4 * h + 3])));
      }
    } else {
      uint32_t w[4];
      for (int i = 0; i < 4; ++i) {
        w[i] = bits_of(from_float<Out>(v[2 * i])) | bits_of(from_float<Out>(v[2 * i + 1])) << 16;
      }
      *reinterpret_cast<uint4*>(out) = make_uint4(w[0], w[1], w[2], w[3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) out[i] = from_float<Out>(v[i]);
  }
}

__device__ __forceinline__ void store_eight(void* out, DType type, int64_t index,
                                            const float (&v)[8], int count, bool wide) {
  switch (type) {
    case DType::kFloat32:
      return store_eight(static_cast<float*>(out) + index, v, count, wide);
    case DType::kBFloat16:
      return store_eight(static_cast<__nv_bfloat16*>(out) + index, v, count, wide);
    default:
      return store_eight(static_cast<__half*>(out) + index, v, count, wide);
  }
}

// Rows [begin, end) of out become zero by `threads` threads of every block.
__device__ __forceinline__ void zero_rows(const GroupedGemmParams& p, int64_t begin, int64_t end,
                                          int threads, int thread, bool wide) {
  if (p.rows_not_zeroed) return;
  const int64_t each = 8, vectors = (p.n + each - 1) / each;
  const float zeros[8] = {};
  for (int64_t i = int64_t{blockIdx.x} * threads + thread; i < (end - begin) * vectors;
       i += int64_t{gridDim.x} * threads) {
    const int64_t row = begin + i / vectors, n = i % vectors * each;
    store_eight(p.out, p.out_type, row * p.n + n, zeros, static_cast<int>(min(each, p.n - n)),
                wide);
  }
}

NVFP4_HD bool wide_stores(const GroupedGemmParams& p) {
  return reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.n % 8 == 0;
}

// early: starts while the kernel ahead, if that lets it, still runs; waits for it where it must.
template <typename Kernel, typename Args>
void launch_persistent(const char* name, Kernel kernel, int64_t items, int threads,
                       size_t shared_bytes, int blocks_per_sm, Stream stream, const Args& args,
                       int cluster = 1, bool early = false) {
  const int64_t resident = int64_t{current_device().sm_count} / cluster * blocks_per_sm;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(std::max<int64_t>(1, std::min(items, resident)) * cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = as_stream(stream);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& one = attributes[config.numAttrs++];
    one.id = cudaLaunchAttributeClusterDimension;
    one.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  if (early) {
    cudaLaunchAttribute& one = attributes[config.numAttrs++];
    one.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    one.val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, args), name);
}

}  // namespace nvfp4::cuda
