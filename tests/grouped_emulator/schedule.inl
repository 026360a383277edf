// Which block makes what: the schedule and the shares of csrc/cuda, without the kernels that ask
// them. Part of main.cpp.

// The list of tiles alone: every row and column of a window once, in strips of three tiles of rows.
std::vector<cuda::GroupedTile> listed;

void list_tiles(const GroupedGemmParams p, cuda::RowWindow window) {
  auto* const memory = reinterpret_cast<cuda::ScheduleMemory<32>*>(cuda::dynamic_shared());
  cuda::Schedule<32, 4, 8, cuda::BlockBarrier, 3> schedule(p, memory, static_cast<int>(threadIdx.x),
                                                           window);
  cuda::GroupedTile tile;
  for (int64_t item = 0; schedule.find(item, tile); ++item) {
    if (threadIdx.x == 0) listed.push_back(tile);
  }
}

int test_schedule() {
  Outcome outcome;
  for (int i = 0; i < 40; ++i) {
    const int64_t m = 1 + rng() % 200, groups = 1 + rng() % (i % 8 ? 12 : 1200);
    Buffer offs(groups * 4), ends((groups + 1) * 4);
    std::vector<int32_t> want(groups + 1, 0);
    for (int64_t e = 0; e < groups; ++e) {
      const int64_t end = static_cast<int64_t>(rng() % (m + 20)) - 10;
      offs.as<int32_t>()[e] = static_cast<int32_t>(i % 2 ? end : m * e / groups);
      const int64_t inside = std::clamp<int64_t>(offs.as<int32_t>()[e], 0, m);
      want[e + 1] = std::max(want[e], static_cast<int32_t>(inside));
    }
    GroupedGemmParams p;
    p.offs = offs.as<int32_t>();
    p.groups = groups;
    p.m = m;
    p.n = 1 + rng() % 60;
    const int64_t begin = rng() % 3 ? 0 : rng() % m;
    const cuda::RowWindow window{begin, rng() % 3 ? m : begin + rng() % (m - begin + 1)};
    listed.clear();
    emulator::launch(dim3(1), dim3(32), 1, sizeof(cuda::ScheduleMemory<32>),
                     [&] { list_tiles(p, window); });
    const int64_t tiles_n = (p.n + 7) / 8;
    std::vector<int> count(m * tiles_n);
    bool right = true;
    for (const auto& tile : listed) {
      const bool inside =
          tile.rows > 0 && tile.n < p.n && tile.row >= std::max<int64_t>(want[tile.group], begin) &&
          tile.row + tile.rows <= std::min<int64_t>(want[tile.group + 1], window.end);
      right = right && inside;
      for (int r = 0; inside && r < tile.rows; ++r) ++count[(tile.row + r) * tiles_n + tile.n / 8];
    }
    for (int64_t r = 0; r < m; ++r) {
      const bool has = r >= window.begin && r < std::min<int64_t>(window.end, want[groups]);
      for (int64_t c = 0; c < tiles_n; ++c) right = right && count[r * tiles_n + c] == has;
    }
    Buffer zeros(1000);
    cuda::grouped_ends(p, ends.as<int32_t>(), zeros.as<unsigned>(), 250, nullptr);
    right = right && std::count(zeros.data(), zeros.data() + 1000, 0) == 1000;
    right = right && std::memcmp(ends.data(), want.data(), (groups + 1) * 4) == 0;
    ++outcome.cases;
    outcome.failed += !right;
  }
  return report("schedule", outcome);
}

// Shares alone: of every tile each step once; what is cut is cut once, in two pieces that name the
// same cut; no block has much more to do than another, in the lengths that shares go by.
struct SomeLengths {
  static constexpr int kWhole = 24;  // 4 rows
  static int of(int rows) { return 8 + 4 * rows; }
};
using UnevenSchedule = cuda::Schedule<32, 4, 8, cuda::BlockBarrier, cuda::kNoStrips, SomeLengths>;
std::vector<std::pair<int, cuda::TilePiece>> shared;  // by block

void list_pieces(const GroupedGemmParams p, cuda::RowWindow window, int steps) {
  auto* const memory = reinterpret_cast<UnevenSchedule::Memory*>(cuda::dynamic_shared());
  const int lane = static_cast<int>(threadIdx.x);
  UnevenSchedule schedule(p, memory, lane, window);
  cuda::Shares<UnevenSchedule> shares(schedule, steps, lane);
  for (cuda::TilePiece piece; shares.next(piece);) {
    if (lane == 0) shared.emplace_back(static_cast<int>(blockIdx.x), piece);
  }
}

int test_shares() {
  Outcome outcome;
  for (int i = 0; i < 200; ++i) {
    const int64_t m = 1 + rng() % 300, groups = 1 + rng() % (i % 8 ? 30 : 600);
    const int blocks = 1 + rng() % 12, steps = 1 + rng() % 20;
    Buffer offs(groups * 4);
    for (int64_t e = 0; e < groups; ++e)
      offs.as<int32_t>()[e] = static_cast<int32_t>(rng() % (m + 1));
    std::sort(offs.as<int32_t>(), offs.as<int32_t>() + groups);
    GroupedGemmParams p;
    p.offs = offs.as<int32_t>();
    p.groups = groups;
    p.m = m;
    p.n = 1 + rng() % 80;
    const int64_t begin = rng() % 3 ? 0 : rng() % m;
    const cuda::RowWindow window{begin, m};
    shared.clear();
    emulator::launch(dim3(blocks), dim3(32), 1, sizeof(UnevenSchedule::Memory),
                     [&] { list_pieces(p, window, steps); });
    const int64_t tiles_n = (p.n + 7) / 8;
    std::vector<int> count(m * tiles_n * steps);
    std::map<std::pair<int64_t, int64_t>, std::vector<std::pair<int, cuda::TilePiece>>> cut;
    std::vector<double> length(blocks);
    double all = 0, items = 0;
    int longest = 0;
    for (const auto& [block, piece] : shared) {
      const auto& tile = piece.tile;
      for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
        for (int s = piece.begin; s < piece.end; ++s)
          ++count[(r * tiles_n + tile.n / 8) * steps + s];
      }
      if (piece.meets != cuda::kWholeTile) cut[{tile.row, tile.n}].emplace_back(block, piece);
      const double share = double(piece.end - piece.begin) / steps;
      length[block] += share * SomeLengths::of(tile.rows);
      all += share * SomeLengths::of(tile.rows);
      items += share;
      longest = std::max(longest, SomeLengths::of(tile.rows));
    }
    bool right = true;
    const int32_t last = offs.as<int32_t>()[groups - 1];
    for (int64_t r = 0; r < m; ++r) {
      const int want = r >= begin && r < last;
      for (int64_t x = 0; x < tiles_n * steps; ++x) {
        right = right && count[r * tiles_n * steps + x] == want;
      }
    }
    for (const auto& [place, pieces] : cut) {
      right = right && pieces.size() == 2;
      if (!right) break;
      const auto& [head, tail] =
          std::minmax(pieces[0], pieces[1],
                      [](const auto& a, const auto& b) { return a.second.begin < b.second.begin; });
      right = right && head.second.begin == 0 && head.second.end == tail.second.begin &&
              tail.second.end == steps && head.first + 1 == tail.first &&
              head.second.meets == tail.first && tail.second.meets == tail.first;
    }
    const double most = *std::max_element(length.begin(), length.end());
    const double whole = std::ceil(items / blocks - 1e-6) * longest;  // at most, if tiles are whole
    const double step = double(longest) / steps * cuda::kLeastSteps + 2;
    const bool can = groups <= cuda::kWindow && std::floor(all / blocks) >= longest;
    right =
        right &&
        most <= (can ? std::max(all / blocks * 20 / 19, all / blocks + 2 * step) : whole) + 1e-6;
    outcome.changed += !cut.empty();
    ++outcome.cases;
    if (!right && outcome.failed++ < 5) {
      std::printf(
          "  shares: m=%lld n=%lld e=%lld blocks=%d steps=%d begin=%lld: longest share %g of %g\n",
          (long long)m, (long long)p.n, (long long)groups, blocks, steps, (long long)begin, most,
          all / blocks);
    }
  }
  if (outcome.changed < 50) outcome.cases = 0;  // too few with a cut
  return report("shares", outcome);
}
