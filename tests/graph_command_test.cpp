// The table of a graph, from nodes and edges made up here.
#include <stepgraph/tools/graph_command.h>

#include <gtest/gtest.h>

namespace stepgraph::test {
namespace {

TEST(GraphTable, NamesWhatEachNodeFollowsAndCountsAtTheEnd) {
    const std::vector<GraphNode> nodes{{cudaGraphNodeTypeKernel, "scan"},
                                       {cudaGraphNodeTypeKernel, "score"},
                                       {cudaGraphNodeTypeMemset, "memset"},
                                       {cudaGraphNodeTypeKernel, "select"}};
    const std::vector<GraphEdge> edges{{0, 1, true}, {0, 2, false}, {1, 3, true}, {2, 3, false}};
    EXPECT_EQ(tools::graph_table(nodes, edges),
              "node  what    follows\n"
              "   0  scan    nothing\n"
              "   1  score   0 programmatic\n"
              "   2  memset  0 full\n"
              "   3  select  1 programmatic, 2 full\n"
              "3 kernels, 1 other node, 2 programmatic edges, 2 full edges into memset, select\n");
}

TEST(GraphTable, OfOneNodeCountsInTheSingular) {
    EXPECT_EQ(tools::graph_table({{cudaGraphNodeTypeKernel, "scan"}}, {}),
              "node  what  follows\n"
              "   0  scan  nothing\n"
              "1 kernel, 0 other nodes, 0 programmatic edges, 0 full edges\n");
}

}  // namespace
}  // namespace stepgraph::test
