// From the block-sparse view to row tiles: the rows of every block cut by shape, the positions and
// the keys of each tile. Where several levels cover the same tokens, decides which tiles leave
// partial states for that reason alone, and who writes tokens that see no key at all.
#include <algorithm>

#include "plait/error.h"
#include "scheduler/scheduler.h"

namespace plait::scheduler {
namespace {

constexpr int kMaxPosition = 1 << 30;  // keys; sums of two stay within int

int row_of_q(const Plan& plan, const RowBlock& block, int token) {
  const int i = block.first_token + token;
  return plan.row_map.empty() ? i : plan.row_map[i];
}

// Requests whose tokens a block has. Rows of q are in request order.
int requests_of(const Plan& plan, const RowBlock& block) {
  if (block.num_tokens == 0) return 0;
  if (plan.row_map.empty() && plan.token_request[block.first_token] ==
                                  plan.token_request[block.first_token + block.num_tokens - 1]) {
    return 1;
  }
  int count = 1;
  for (int i = 1; i < block.num_tokens; ++i) {
    count += plan.token_request[row_of_q(plan, block, i)] !=
             plan.token_request[row_of_q(plan, block, i - 1)];
  }
  return count;
}

// Rows [first_row, first_row + num_rows) of a block as a tile, with positions and keys.
RowTile make_tile(const Plan& plan, const Visibility& visible, const CostModel& model,
                  int row_block, int first_row, int num_rows) {
  const RowBlock& block = plan.row_blocks[row_block];
  RowTile tile{};
  tile.row_block = row_block;
  tile.shape = shape_for(model.tile_q, model.num_shapes, num_rows);
  tile.first_row = first_row;
  tile.num_rows = num_rows;
  const int first_token = first_row / model.group_size;
  const int last_token = (first_row + num_rows - 1) / model.group_size;
  tile.min_position = tile.max_position = plan.token_position[row_of_q(plan, block, first_token)];
  if (plan.row_map.empty()) {  // a loop over consecutive integers, which vectorises
    const int* position = plan.token_position.data() + block.first_token;
    for (int i = first_token + 1; i <= last_token; ++i) {
      tile.min_position = std::min(tile.min_position, position[i]);
      tile.max_position = std::max(tile.max_position, position[i]);
    }
  } else {
    for (int i = first_token + 1; i <= last_token; ++i) {
      const int position = plan.token_position[row_of_q(plan, block, i)];
      tile.min_position = std::min(tile.min_position, position);
      tile.max_position = std::max(tile.max_position, position);
    }
  }
  find_keys(visible, block, model.rules, tile);
  return tile;
}

// Appends the row tiles of plan.row_blocks[first_block] and all after it.
void cut_rows(const Visibility& visible, const CostModel& model, const Plan& plan,
              size_t first_block, std::vector<RowTile>& tiles) {
  constexpr i64 kMostRows = i64{1} << 30;
  for (size_t b = first_block; b < plan.row_blocks.size(); ++b) {
    const i64 all_rows = i64{plan.row_blocks[b].num_tokens} * model.group_size;
    check(all_rows <= kMostRows, "plan: row block ", b, " has ", plan.row_blocks[b].num_tokens,
          " tokens x group_size ", model.group_size, "; at most ", kMostRows, " rows are taken");
    const int block_rows = static_cast<int>(all_rows);
    const int num_tiles =
        num_row_tiles(plan.row_blocks[b].num_tokens, model.tile_q[0], model.group_size);
    for (int i = 0; i < num_tiles; ++i) {
      const int row = first_row_of(i, model.tile_q[0], model.group_size);
      const int num_rows = rows_from(row, block_rows, model.tile_q[0], model.group_size);
      tiles.push_back(make_tile(plan, visible, model, static_cast<int>(b), row, num_rows));
    }
  }
}

// Checks what plan_data.h asks of row blocks. True if the blocks are one level that lists all
// tokens in order: then no token can be in two tiles or in none.
bool check_blocks(const BsrView& view, int chunk_keys) {
  const i64 num_tokens = view.token_position.size();
  const i64 num_entries = view.row_map.empty() ? num_tokens : view.row_map.size();
  check(view.token_request.size() == view.token_position.size(), "plan: token_request has ",
        view.token_request.size(), " entries, token_position ", view.token_position.size());
  check(view.num_levels >= 1 && view.num_levels <= kMaxLevels, "plan: num_levels is ",
        view.num_levels, ", must be 1 to ", kMaxLevels);
  bool in_order = view.num_levels == 1 && view.row_map.empty();
  i64 next_token = 0;
  int level = 0;
  for (size_t b = 0; b < view.row_blocks.size(); ++b) {
    const RowBlock& block = view.row_blocks[b];
    check(block.first_token >= 0 && block.num_tokens >= 0 &&
              i64{block.first_token} + block.num_tokens <= num_entries,
          "plan: row_blocks[", b, "] has tokens ", block.first_token, " + ", block.num_tokens,
          ", but there are ", num_entries);
    check(block.kv_len >= 0 && block.kv_pos_begin >= 0 &&
              i64{block.kv_pos_begin} + block.kv_len <= kMaxPosition,
          "plan: row_blocks[", b, "] has kv_len ", block.kv_len, " and kv_pos_begin ",
          block.kv_pos_begin, ", must be at least 0 and together at most ", kMaxPosition);
    check(chunk_keys == 0 || block.kv_len == 0 || block.kv_pos_begin % chunk_keys == 0,
          "plan: row_blocks[", b, "] of level ", block.level, " begins at position ",
          block.kv_pos_begin, "; in invariant mode levels are cut at multiples of ", chunk_keys,
          " keys");
    check(block.level >= level && block.level < view.num_levels, "plan: row_blocks[", b,
          "].level is ", block.level, ", must not descend and be less than ", view.num_levels);
    level = block.level;
    in_order &= block.first_token == next_token;
    next_token += block.num_tokens;
  }
  return in_order && next_token == num_tokens;
}

// Levels cover each token at most once.
void check_levels(const BsrView& view, std::vector<int>& mark) {
  const int num_tokens = static_cast<int>(view.token_position.size());
  for (size_t i = 0; i < view.row_map.size(); ++i) {
    check(view.row_map[i] >= 0 && view.row_map[i] < num_tokens, "plan: row_map[", i, "] is ",
          view.row_map[i], ", but there are ", num_tokens, " query tokens");
  }
  mark.assign(num_tokens, -1);
  for (size_t b = 0; b < view.row_blocks.size(); ++b) {
    const RowBlock& block = view.row_blocks[b];
    for (int i = block.first_token; i < block.first_token + block.num_tokens; ++i) {
      const int row = view.row_map.empty() ? i : view.row_map[i];
      check(mark[row] != block.level, "plan: row_blocks[", b, "] has query token ", row,
            " a second time in level ", block.level);
      mark[row] = block.level;
    }
  }
}

// Tokens that no row block names get one without keys.
void add_blocks_for_tokens_without_source(const std::vector<int>& sources, Plan& plan) {
  const size_t old_blocks = plan.row_blocks.size();
  const bool with_map = !plan.row_map.empty();
  for (int row = 0; row < plan.num_tokens; ++row) {
    if (sources[row] != 0) continue;
    const int entry = with_map ? static_cast<int>(plan.row_map.size()) : row;
    if (with_map) plan.row_map.push_back(row);
    if (plan.row_blocks.size() > old_blocks &&
        plan.row_blocks.back().first_token + plan.row_blocks.back().num_tokens == entry) {
      ++plan.row_blocks.back().num_tokens;
    } else {
      plan.row_blocks.push_back({.first_block = 0,
                                 .first_token = entry,
                                 .num_tokens = 1,
                                 .kv_len = 0,
                                 .kv_pos_begin = 0,
                                 .level = plan.num_levels - 1});
    }
  }
}

// Keeps the tiles with keys, and of those without only the rows of tokens that nothing else writes.
// sources[row of q]: levels in which the token sees keys; afterwards -1 where an empty tile has it.
void join_levels(const Visibility& visible, const CostModel& model, Scratch& scratch, Plan& plan) {
  const int group = model.group_size;
  std::vector<int>& sources = scratch.token_sources;
  sources.assign(plan.num_tokens, 0);
  const auto for_tokens = [&](const RowTile& tile, auto&& visit) {
    const RowBlock& block = plan.row_blocks[tile.row_block];
    const int end = (tile.first_row + tile.num_rows - 1) / group + 1;
    for (int i = tile.first_row / group; i < end; ++i) visit(i, sources[row_of_q(plan, block, i)]);
  };
  for (const RowTile& tile : scratch.tiles) {
    if (tile.seen() == 0 || tile.first_row % group != 0) continue;  // a split token counts once
    for_tokens(tile, [](int, int& count) { ++count; });
  }
  std::vector<RowTile>& kept = scratch.joined_tiles;
  kept.clear();
  for (RowTile tile : scratch.tiles) {
    if (tile.seen() > 0) {
      for_tokens(tile, [&](int, int& count) { tile.merged |= count > 1; });
      kept.push_back(tile);
    } else if (group > model.tile_q[0]) {
      for_tokens(tile, [&](int, int& count) {
        if (count != 0) return;
        kept.push_back(tile);
        if ((tile.first_row + tile.num_rows) % group == 0) count = -1;
      });
    } else {
      int run_begin = -1, run_end = -1;
      const auto close_run = [&] {
        if (run_begin < 0) return;
        kept.push_back(make_tile(plan, visible, model, tile.row_block, run_begin * group,
                                 (run_end - run_begin) * group));
        run_begin = -1;
      };
      for_tokens(tile, [&](int i, int& count) {
        if (count != 0) return close_run();
        count = -1;
        if (run_begin < 0) run_begin = i;
        run_end = i + 1;
      });
      close_run();
    }
  }
  scratch.tiles.swap(kept);
}

}  // namespace

void make_row_tiles(const BsrView& view, const Visibility& visible, const CostModel& model,
                    Scratch& scratch, Plan& plan) {
  const bool in_order = check_blocks(view, model.chunk_keys);
  if (!in_order) check_levels(view, scratch.token_mark);
  plan.row_blocks = view.row_blocks;
  plan.row_map = view.row_map;
  plan.token_request = view.token_request;
  plan.token_position = view.token_position;
  plan.num_tokens = static_cast<int>(view.token_position.size());
  plan.num_requests = view.num_requests;
  plan.num_levels = view.num_levels;
  plan.visible = visible;
  plan.total_keys = 0;
  for (const RowBlock& block : plan.row_blocks) {
    plan.total_keys += i64{requests_of(plan, block)} * block.kv_len;
  }

  scratch.tiles.clear();
  cut_rows(visible, model, plan, 0, scratch.tiles);
  if (!in_order) {
    join_levels(visible, model, scratch, plan);
    const size_t num_blocks = plan.row_blocks.size();
    add_blocks_for_tokens_without_source(scratch.token_sources, plan);
    cut_rows(visible, model, plan, num_blocks, scratch.tiles);
  }
  for (RowTile& tile : scratch.tiles) {
    tile.head_ps = tile_ps(model.shapes[tile.shape], model.rules, tile.seen(), tile.merged != 0);
  }
}

}  // namespace plait::scheduler
