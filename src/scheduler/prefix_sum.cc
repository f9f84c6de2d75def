// Shares by prefix sums, on the host: what kernels/plan_lengths.cuh does on the device, cut for
// cut, by the same functions.
#include <algorithm>

#include "host_device/shares.h"
#include "scheduler/scheduler.h"

namespace plait::scheduler {
namespace {

class PrefixSums {
 public:
  PrefixSums(const std::vector<RowTile>& tiles, const CostModel& model)
      : tiles_(tiles), model_(model) {
    i64 keys = 0, unsplit_ps = 0, pieces_ps = 0;
    int smallest = 0, longest = 0;  // units_of
    for (const RowTile& tile : tiles) {
      keys += tile.seen();
      unsplit_ps += unsplit_length(tile, model.rules).total_ps();
      unsplit_end_ps_.push_back(unsplit_ps);
      smallest = std::max(smallest,
                          units_of(smallest_piece_ps(tile, model.shapes[tile.shape], model.rules)));
    }
    list_.num_tiles = static_cast<int>(tiles.size());
    list_.chunk = keys_a_cta(keys * model.rules.num_kv_heads, model.rules, model.num_ctas);
    num_ways_ = share_ways(list_.num_tiles, model.rules, model.num_ctas);
    for (const RowTile& tile : tiles) {
      if (num_ways_ == 1) break;
      const TileLength length =
          length_in_pieces(tile, model.shapes[tile.shape], model.rules, list_.chunk);
      pieces_ps += length.total_ps();
      pieces_end_ps_.push_back(pieces_ps);
      longest = std::max(longest, units_of(length.piece_ps));
    }
    list_.unsplit_end_ps = unsplit_end_ps_.data();
    list_.pieces_end_ps = pieces_end_ps_.data();
    const i64 mean_ps = mean_share(pieces_ps, model.num_ctas);
    list_.share_ps[0] = share_of(mean_share(unsplit_ps, model.num_ctas), smallest);
    list_.share_ps[1] = share_of(mean_ps, 0);
    list_.share_ps[2] = share_of(mean_ps, longest);
  }

  // The cuts that are modelled fastest, [num_ctas + 1].
  std::vector<ListCut> best_cuts() const {
    std::vector<ListCut> best, cuts(model_.num_ctas + 1);
    unsigned best_units = 0;
    for (int way = 0; way < num_ways_; ++way) {
      for (int cta = 0; cta <= model_.num_ctas; ++cta) {
        cuts[cta] = cut_list(list_, tiles_, model_.shapes, model_.rules, way, cta);
      }
      const unsigned units = slowest(cuts);
      if (best.empty() || units < best_units) {
        best = cuts;
        best_units = units;
      }
    }
    return best;
  }

 private:
  unsigned slowest(const std::vector<ListCut>& cuts) const {
    const auto load = [&](int cta) {
      return cta < model_.num_ctas
                 ? units_of(run_ps(cuts[cta], cuts[cta + 1], model_.shapes, model_.rules))
                 : 0;
    };
    const auto is_inside = [](const ListCut& cut) { return cut.shape >= 0; };
    unsigned slowest = 0;
    for (int i = 0; i < num_loads(model_.num_ctas, model_.num_sms); ++i) {
      slowest = std::max(slowest, load_of(i, model_.num_sms, load));
    }
    return slowest + join_units(model_.num_sms, std::any_of(cuts.begin(), cuts.end(), is_inside));
  }

  const std::vector<RowTile>& tiles_;
  const CostModel& model_;
  int num_ways_ = 0;
  MeasuredList list_{};
  std::vector<i64> unsplit_end_ps_, pieces_end_ps_;
};

}  // namespace

void cut_by_prefix_sum(const std::vector<RowTile>& tiles, const CostModel& model, Cuts& cuts) {
  cuts.clear();
  const std::vector<ListCut> list_cuts = PrefixSums(tiles, model).best_cuts();
  for (int cta = 0; cta < model.num_ctas; ++cta) {
    const ListRun run{list_cuts[cta].at, list_cuts[cta + 1].at, model.rules.num_kv_heads};
    for (int i = 0; i < run.size(); ++i) {
      const ListPiece piece = piece_of(run, i);
      const RowTile& tile = tiles[piece.at.tile];
      cuts.items.push_back(make_item(tile, piece.at.head, piece.num_heads, piece.at.key,
                                     piece.key_end < 0 ? tile.seen() : piece.key_end,
                                     piece.is_part || tile.merged != 0));
      cuts.cta.push_back(cta);
    }
  }
}

}  // namespace plait::scheduler
