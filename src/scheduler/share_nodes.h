// Which nodes of a prefix tree are shared: prices row blocks (block_us()) and takes the cheapest
// choice there is (choose_nodes()). Used by compose_radix alone.
#pragma once
#include <vector>

#include "formats/radix_tree.h"
#include "plait/compose_radix.h"

namespace plait::scheduler {

struct ShareChoice {
  std::vector<int> level;         // by node; -1: flat, its keys are in the lists below it
  std::vector<int> base;          // by node: where its list begins, behind the shared node above it
  std::vector<char> apart;        // by request: takes no part, all its keys are in the last level
  std::vector<NodeChoice> nodes;  // for explain()
};

// max_levels: with the last one, 2 or more. Throws ArgumentError where nodes that can be joined
// with nothing take more.
ShareChoice choose_shared_nodes(const PrefixTree& tree, const RadixOptions& options,
                                int max_levels);

}  // namespace plait::scheduler
